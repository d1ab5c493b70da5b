/* search: binary search by a condition. */
#ifndef MLS_SEARCH_H
#define MLS_SEARCH_H

#include <stddef.h>

/* Set `at`, a variable of type size_t, to the first index below `count` for which
 * `condition`, an expression that reads `at`, is true; to `count` if there is none.
 * `condition` must be true for all later indices too. */
#define MLS_FIND_FIRST(at, count, condition)                                             \
    do {                                                                                 \
        size_t low_ = 0, high_ = (count);                                                \
        while (low_ < high_) {                                                           \
            (at) = low_ + (high_ - low_) / 2;                                            \
            if (condition) {                                                             \
                high_ = (at);                                                            \
            } else {                                                                     \
                low_ = (at) + 1;                                                         \
            }                                                                            \
        }                                                                                \
        (at) = low_;                                                                     \
    } while (0)

#endif
