/* stretches: work that is best gone on with by whoever began it, handed out to threads.
 *
 * Items 0 .. n - 1 lie in stretches, one behind the other, such as the parts of a file.
 * Each thread takes a stretch to itself and goes along it; one that finds none untouched
 * helps others with the rest of theirs, so that all end together.
 */
#ifndef MLS_STRETCHES_H
#define MLS_STRETCHES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* Make it with mls_stretches_init. */
typedef struct mls_stretches {
    const size_t *starts;    /* the first item of each, and the end; borrowed */
    size_t count;            /* of stretches */
    atomic_size_t *next;     /* the next item of each */
    atomic_size_t untouched; /* the first stretch that nobody has taken */
} mls_stretches;

/* Gives: free with mls_stretches_fini.  False: no memory. */
bool mls_stretches_init(mls_stretches *all, const size_t *starts, size_t count);

/* Accepts stretches of zeros. */
void mls_stretches_fini(mls_stretches *all);

/* The next item for a thread, each item once; false: there are no more.  `*mine` is the
 * thread's own note of where it is, SIZE_MAX to begin with. */
bool mls_stretches_take(mls_stretches *all, size_t *mine, size_t *item);

#endif
