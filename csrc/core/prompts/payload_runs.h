/* payload_runs: the bytes of a strided view in C order, run by run; the length of runs
 * that pay.
 *
 * A run is as long as the layout allows. Views with short runs are slow to transfer run
 * by run; the caller then copies them as a whole.
 */
#ifndef MLS_PAYLOAD_RUNS_H
#define MLS_PAYLOAD_RUNS_H

#include "array/tensor.h"

#include <stdbool.h>
#include <stddef.h>

enum { MLS_PAYLOAD_RUN = 512 }; /* shorter runs are copied together */

/* Iterates over the runs of a view, which it borrows. */
typedef struct mls_payload_runs {
    const mls_tensor *view;
    int rank;                   /* axes outside a run */
    size_t bytes;               /* of a run; 0: the view is empty */
    size_t index[MLS_MAX_RANK]; /* of the next run, on these axes */
    unsigned char *next;        /* the next run; NULL at the end */
} mls_payload_runs;

/* Start at the first run of `view`. */
void mls_payload_runs_init(mls_payload_runs *runs, const mls_tensor *view);

/* Return the address of the next run of `bytes` bytes, or NULL at the end. */
unsigned char *mls_payload_runs_next(mls_payload_runs *runs);

/* Return whether the runs are long enough to be transferred one by one: they have
 * MLS_PAYLOAD_RUN bytes or are the whole view, and the bytes are in this machine's
 * order. */
bool mls_payload_runs_are_long(const mls_payload_runs *runs);

#endif
