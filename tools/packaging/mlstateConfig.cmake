# mlstate::kv is the shared library of mlstate/kv.h, mlstate::kv_static the static one.
# The prefix is found from this file's own place, so that the installed files may move together.
get_filename_component(_mlstate_prefix "${CMAKE_CURRENT_LIST_DIR}/../../@UP@" ABSOLUTE)
if(NOT TARGET mlstate::kv)
  add_library(mlstate::kv SHARED IMPORTED)
  set_target_properties(mlstate::kv PROPERTIES
    IMPORTED_LOCATION "${_mlstate_prefix}/@LIBDIR@/@SHARED@"
    IMPORTED_SONAME "@SONAME@"
    INTERFACE_INCLUDE_DIRECTORIES "${_mlstate_prefix}/include")
  add_library(mlstate::kv_static STATIC IMPORTED)
  set_target_properties(mlstate::kv_static PROPERTIES
    IMPORTED_LOCATION "${_mlstate_prefix}/@LIBDIR@/libmlstate_kv.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_mlstate_prefix}/include"
    INTERFACE_LINK_LIBRARIES "pthread;m")
endif()
unset(_mlstate_prefix)
