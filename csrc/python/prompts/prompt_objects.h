/* prompt_objects: functions that PromptLog and PromptMatch share. */
#ifndef MLSPY_PROMPT_OBJECTS_H
#define MLSPY_PROMPT_OBJECTS_H

#include "common/python_api.h"

#include "common/module_state.h"

#include "prompts/prompt_log.h"

/* PromptLog. `calls` counts the calls in progress: if the object is closed meanwhile, the
 * last of them frees `log`. */
typedef struct mlspy_prompt_log {
    PyObject_HEAD mls_prompt_log *log; /* NULL: closed */
    PyObject *path;
    Py_ssize_t calls;
    bool is_closed;
} mlspy_prompt_log;

/* PromptMatch. If it is closed during calls, the last of them closes `match`. */
typedef struct mlspy_prompt_match {
    PyObject_HEAD mls_prompt_match *match;
    PyObject *records;        /* a tuple; NULL: not made yet */
    PyObject *heads, *damage; /* tuples */
    PyObject *path;           /* of the log */
    size_t length;
    Py_ssize_t calls;
    bool is_closed;
} mlspy_prompt_match;

/* Return a new PromptMatch, which owns `match` from now on, also on failure. `path` is
 * the log's. */
PyObject *mlspy_prompt_match_of(const mlspy_state *state, mls_prompt_match *match,
                                PyObject *path);

/* Return a match for a call, or NULL with TypeError or ValueError (closed) set. The
 * caller calls mlspy_prompt_match_leave at the end. */
const mls_prompt_match *mlspy_prompt_match_enter(const mlspy_state *state,
                                                 PyObject *object);
/* End the call that mlspy_prompt_match_enter began. */
void mlspy_prompt_match_leave(PyObject *object);

/* Return a new str with the name of a segment, the offset in it and the text of the
 * damage, such as "segment-00000001, offset 64: text". */
PyObject *mlspy_prompt_damage_text(const mls_prompt_damage *damage);

#endif
