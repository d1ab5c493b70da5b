# The version of the header: within a major version, a newer minor one is compatible.
set(PACKAGE_VERSION "@VERSION@")
string(REGEX MATCH "^[0-9]+" _mlstate_major "${PACKAGE_VERSION}")
if(PACKAGE_FIND_VERSION_MAJOR STREQUAL _mlstate_major
   AND PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
unset(_mlstate_major)
