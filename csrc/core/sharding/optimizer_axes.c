/* optimizer_axes: which axis of its parameter each axis of an optimizer state has
 * (Adafactor), by shapes and name.
 *
 * A state dict does not record how the axes of a state relate to its parameter, so they
 * are inferred from the shapes. The name decides if the shapes are ambiguous, as for a
 * square matrix.
 */
#include "sharding/optimizer_axes.h"

#include <string.h>

/* Return whether `text` contains `word` anywhere. */
static bool contains_word(mls_str text, const char *word)
{
    const size_t length = strlen(word);
    for (size_t i = 0; i + length <= text.length; i++) {
        if (memcmp(text.data + i, word, length) == 0) {
            return true;
        }
    }
    return false;
}

/* Return whether `shape`, which has one axis less, is the parameter's shape without axis
 * number `without`. */
static bool lacks_axis(const size_t *shape, int parameter_rank,
                       const size_t *parameter_shape, int without)
{
    for (int i = 0, j = 0; j < parameter_rank; j++) {
        if (j != without && shape[i++] != parameter_shape[j]) {
            return false;
        }
    }
    return true;
}

/* Return the parameter's axis that the state named `state` lacks, or MLS_NO_AXIS. `shape`
 * is the state's, with one axis less than the parameter's. Row statistics are summed over
 * the last axis: "row" states lack the last axis, "col" states the one before it. If
 * several axes fit, the name decides, else the last axis that fits. */
static int find_missing_axis(mls_str state, const size_t *shape, int parameter_rank,
                             const size_t *parameter_shape)
{
    /* Adafactor has "exp_avg_sq_row" in transformers and "row_var" in torch; both contain
     * the word */
    const int hint = contains_word(state, "row")   ? parameter_rank - 1
                     : contains_word(state, "col") ? parameter_rank - 2
                                                   : MLS_NO_AXIS;
    if (hint >= 0 && lacks_axis(shape, parameter_rank, parameter_shape, hint)) {
        return hint;
    }
    for (int without = parameter_rank - 1; without >= 0; without--) {
        if (lacks_axis(shape, parameter_rank, parameter_shape, without)) {
            return without;
        }
    }
    return MLS_NO_AXIS;
}

/* Find the parameter's axis for each axis of a state. Returns false, with `axes`
 * unchanged, if the shapes are the same or the state has no axes. Otherwise two cases:
 * the same number of axes, some with length 1; one axis fewer. In all other cases no axis
 * corresponds to one of the parameter's. */
bool mls_optimizer_axes(mls_str state, int rank, const size_t *shape, int parameter_rank,
                        const size_t *parameter_shape, signed char *axes)
{
    bool same = rank == parameter_rank, broadcast = same;
    for (int i = 0; broadcast && i < rank; i++) {
        same = same && shape[i] == parameter_shape[i];
        broadcast = shape[i] == parameter_shape[i] || shape[i] == 1;
    }
    if (same || rank == 0) {
        return false;
    }
    /* A missing axis takes precedence over a broadcast one; a broadcast axis has length 1
     * in the state. */
    const int without =
        rank == parameter_rank - 1
            ? find_missing_axis(state, shape, parameter_rank, parameter_shape)
            : MLS_NO_AXIS;
    for (int i = 0; i < rank; i++) {
        const int axis = without != MLS_NO_AXIS ? i + (i >= without)
                         : broadcast && shape[i] == parameter_shape[i] ? i
                                                                       : MLS_NO_AXIS;
        axes[i] = (signed char)axis;
    }
    return true;
}

/* Return the axis of a tensor of `rank` axes that corresponds to the parameter's axis
 * `parameter_axis`, or MLS_NO_AXIS. `axes` as in mls_layout_project. */
static int axis_of(int parameter_axis, int rank, const signed char *axes)
{
    for (int i = 0; i < rank; i++) {
        if ((axes == NULL ? i : axes[i]) == parameter_axis) {
            return i;
        }
    }
    return MLS_NO_AXIS;
}

/* Convert a parameter's layout and part number to those for a state. Part numbers are
 * mixed-radix: the digits of the remaining steps form the new number. */
void mls_layout_project(const mls_layout *layout, size_t index, int rank,
                        const signed char *axes, mls_layout *out, size_t *out_index)
{
    size_t after = 1; /* number of parts of the later steps */
    /* without remaining steps: the whole tensor, part 0 */
    *out = (mls_layout){0};
    *out_index = 0;
    for (int i = 0; i < layout->count; i++) {
        after *= layout->steps[i].parts;
    }
    for (int i = 0; i < layout->count; i++) {
        const mls_layout_step step = layout->steps[i];
        after /= step.parts;
        const size_t step_index = index / after % step.parts;
        const bool flat = step.axis == MLS_LAYOUT_FLAT;
        const int axis = flat ? step.axis : axis_of(step.axis, rank, axes);
        if (flat ? axes == NULL && rank > 0 : axis != MLS_NO_AXIS) {
            out->steps[out->count++] =
                (mls_layout_step){.axis = axis, .parts = step.parts};
            *out_index = *out_index * step.parts + step_index;
        }
    }
}
