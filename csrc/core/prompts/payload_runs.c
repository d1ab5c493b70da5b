/* payload_runs: finds the next run of adjacent bytes of a strided view, like an odometer
 * over the axes outside. */
#include "prompts/payload_runs.h"

/* Start at the first run. Merge the innermost axes into a run as long as their elements
 * are adjacent. */
void mls_payload_runs_init(mls_payload_runs *runs, const mls_tensor *view)
{
    size_t bytes = mls_tensor_item_bytes(view);
    int rank = view->rank;
    while (rank > 0 &&
           (view->shape[rank - 1] == 1 || view->strides[rank - 1] == (ptrdiff_t)bytes)) {
        bytes *= view->shape[--rank];
    }
    bool is_empty = bytes == 0;
    for (int axis = 0; axis < rank; axis++) {
        is_empty = is_empty || view->shape[axis] == 0;
        runs->index[axis] = 0;
    }
    runs->view = view;
    runs->rank = rank;
    runs->bytes = is_empty ? 0 : bytes;
    runs->next = is_empty ? NULL : view->data;
}

/* Return the next run, or NULL. Advance the address by the stride of the innermost axis
 * that is not at its end, and reset the axes inside it. */
unsigned char *mls_payload_runs_next(mls_payload_runs *runs)
{
    unsigned char *run = runs->next;
    const mls_tensor *view = runs->view;
    for (int axis = runs->rank - 1; run != NULL && axis >= 0; axis--) {
        runs->next += view->strides[axis];
        if (++runs->index[axis] < view->shape[axis]) {
            return run;
        }
        runs->next -= view->strides[axis] * (ptrdiff_t)view->shape[axis];
        runs->index[axis] = 0;
    }
    runs->next = NULL; /* all axes are at their end */
    return run;
}

bool mls_payload_runs_are_long(const mls_payload_runs *runs)
{
    const bool is_swapped = runs->view->swapped && mls_tensor_item_bytes(runs->view) > 1;
    return !is_swapped && (runs->rank == 0 || runs->bytes >= MLS_PAYLOAD_RUN);
}
