/* attempts: work of the core that holds a lock, so that no handler of Python may run in
 * it.
 *
 * A signal stops the work. Its handlers run after it, and unless one of them raised, the
 * work begins again. Each attempt ignores signals for twice as long as the one before
 * took, so that periodic signals cannot prevent the work.
 */
#ifndef MLSPY_ATTEMPTS_H
#define MLSPY_ATTEMPTS_H

#include "common/python_api.h"

#include "base/status.h"

/* Zeros: no attempt yet. */
typedef struct mlspy_attempts {
    bool is_running, is_section;
    int64_t began, patience; /* in nanoseconds */
} mlspy_attempts;

/* Begin an attempt in a section of deferred interrupts (in the main thread), and return
 * true. End the attempt before it, with the result `code`, if there was one: return false
 * unless that is MLS_E_STOPPED and no handler raised. Of the first call, `code` must be
 * MLS_E_STOPPED. So after
 *
 *     for (mlspy_attempts attempts = {0}; mlspy_attempt(&attempts, code);) {
 *         MLSPY_WITHOUT_GIL(code = work());
 *     }
 *
 * an exception is set if and only if `code` is MLS_E_STOPPED. Needs the GIL. */
bool mlspy_attempt(mlspy_attempts *attempts, mls_code code);

/* For mls_progress.report: false if a signal stops the attempt of this thread. Does not
 * need the GIL. */
bool mlspy_attempt_continues(void *unused, uint64_t bytes);

#endif
