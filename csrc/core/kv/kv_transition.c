/* kv_transition: move the key-value cache of a language model to another sequence length.
 *
 * Checks and move are separate: a binding checks first, allocates the target only if the
 * request is valid, and then moves, which cannot fail. Messages are shown to users
 * unchanged, so the request contains the users' parameter names.
 *
 * The move divides a cache by layer and head. The positions of one head are usually
 * contiguous, so its tokens are one run to copy and its padding, right after them, is one
 * run to fill.
 */
#include "kv/kv_transition.h"

#include "base/memory.h"
#include "base/size.h"

#include <inttypes.h>

/* The axis names of a cache in messages. */
static const char *const axis_names[MLS_KV_RANK] = {"layers", "heads", "sequence length",
                                                    "head_dim"};

static const mls_kv_names own_words = {.source = "the source",
                                       .target = "the target",
                                       .target_length = "target length",
                                       .position = "position",
                                       .if_shorter = "compact instead of expanding",
                                       .if_shared = "pass another target"};

/* Return the names of a request, or the default ones. */
static const mls_kv_names *names_of(const mls_kv_request *request)
{
    return request->names != NULL ? request->names : &own_words;
}

/* MLS_E_SHAPE unless `rank` is 4; `what` names the argument. */
static mls_code check_rank(const char *what, int rank, const size_t *shape,
                           mls_status *st)
{
    if (rank == MLS_KV_RANK) {
        return MLS_OK;
    }
    char text[MLS_FACT_BYTES];
    mls_shape_text(text, sizeof text, rank, shape);
    mls_fail(st, MLS_E_SHAPE,
             "%s must have 4 dimensions (layers, heads, sequence, head_dim), got %d: "
             "shape %s",
             what, rank, text);
    mls_status_expected(st, "4 dimensions");
    mls_status_got(st, "%s", text);
    return MLS_E_SHAPE;
}

/* Add the expected and the actual value to a status that is already filled. */
static mls_code add_capacity_range(mls_status *st, int64_t limit, int64_t got)
{
    mls_status_expected(st, "0..%" PRId64, limit);
    mls_status_got(st, "%" PRId64, got);
    return MLS_E_CAPACITY;
}

/* Checks the shape first, then the target's length against the source's, then the tokens
 * against both: the first message is the one that the user should fix first. */
mls_code mls_kv_check(int rank, const size_t *shape, mls_kv_request request,
                      mls_status *st)
{
    const mls_kv_names *names = names_of(&request);
    const mls_code code = check_rank(names->source, rank, shape, st);
    if (code != MLS_OK) {
        return code;
    }
    const int64_t length = (int64_t)shape[MLS_KV_AXIS];
    const int64_t target = request.target_length;
    if (target < 0) {
        return mls_fail(st, MLS_E_CAPACITY, "%s %" PRId64 " is negative",
                        names->target_length, target);
    }
    /* expanding keeps all positions, with or without a token */
    if (request.kind == MLS_KV_EXPAND && target < length) {
        mls_fail(st, MLS_E_CAPACITY,
                 "%s %" PRId64 " is smaller than the source's %" PRId64 ": %s",
                 names->target_length, target, length, names->if_shorter);
        mls_status_expected(st, "at least %" PRId64, length);
        mls_status_got(st, "%" PRId64, target);
        return MLS_E_CAPACITY;
    }
    if (request.position < 0 || request.position > length) {
        mls_fail(st, MLS_E_CAPACITY,
                 "%s %" PRId64 " is outside 0..%" PRId64 ", the source's sequence length",
                 names->position, request.position, length);
        return add_capacity_range(st, length, request.position);
    }
    if (request.position > target) {
        mls_fail(st, MLS_E_CAPACITY,
                 "%" PRId64 " tokens do not fit into %" PRId64
                 " positions: pass a %s of at least %" PRId64,
                 request.position, target, names->target_length, request.position);
        return add_capacity_range(st, target, request.position);
    }
    return MLS_OK;
}

/* All axes except the sequence belong to the model, so a difference in them is a shape
 * error. */
mls_code mls_kv_check_shapes(int source_rank, const size_t *source, int target_rank,
                             const size_t *target, mls_kv_kind kind, mls_status *st)
{
    mls_code code = check_rank("the source state", source_rank, source, st);
    if (code == MLS_OK) {
        code = check_rank("the target state", target_rank, target, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    for (int axis = 0; axis < MLS_KV_RANK; axis++) {
        if (axis != MLS_KV_AXIS && source[axis] != target[axis]) {
            mls_fail(st, MLS_E_SHAPE,
                     "%s differ: the source has %zu, the target %zu; these two states do "
                     "not belong to the same model",
                     axis_names[axis], source[axis], target[axis]);
            mls_status_expected(st, "%zu", source[axis]);
            mls_status_got(st, "%zu", target[axis]);
            return MLS_E_SHAPE;
        }
    }
    if (kind == MLS_KV_EXPAND && target[MLS_KV_AXIS] < source[MLS_KV_AXIS]) {
        mls_fail(st, MLS_E_CAPACITY,
                 "the target's sequence length %zu is smaller than the source's %zu: "
                 "compact instead of expanding",
                 target[MLS_KV_AXIS], source[MLS_KV_AXIS]);
        mls_status_expected(st, "at least %zu", source[MLS_KV_AXIS]);
        mls_status_got(st, "%zu", target[MLS_KV_AXIS]);
        return MLS_E_CAPACITY;
    }
    return MLS_OK;
}

/* The source's shape with the target's length is the expected shape; any other difference
 * is a mismatch. */
mls_code mls_kv_check_target(const mls_tensor *dst, const mls_tensor *src,
                             mls_kv_request request, mls_status *st)
{
    const mls_kv_names *names = names_of(&request);
    mls_tensor wanted = *src;
    wanted.shape[MLS_KV_AXIS] = (size_t)request.target_length;
    const mls_code code = mls_copy_check(dst, &wanted, names->target, st);
    if (code != MLS_OK) {
        return code;
    }
    if (mls_tensor_overlap(dst, src)) {
        return mls_fail(st, MLS_E_OVERLAP, "%s shares memory with %s: %s", names->target,
                        names->source, names->if_shared);
    }
    return MLS_OK;
}

/* One transition, divided by layer so that threads can share it. */
typedef struct job {
    const mls_kernels *kernels;
    mls_tensor filled;      /* the part of the target that receives the tokens */
    mls_tensor tokens;      /* the tokens in the source */
    mls_tensor padding;     /* the rest of the target */
    const mls_element *pad; /* NULL: the padding is already correct */
    mls_destination destination;
    bool populate;   /* request the pages of a head before it is copied */
    bool inner_huge; /* use huge pages where tokens fill them */
} job;

/* Move one layer, as a task for the pool. `context` is a job, which the threads only
 * read. Fresh memory is written from its end, as in next_part in copy.c. */
static void move_layer(void *context, size_t turn)
{
    const job *j = context;
    const bool is_fresh = j->destination.is_fresh;
    const size_t layer = is_fresh ? j->filled.shape[0] - 1 - turn : turn;
    const mls_tensor filled = mls_tensor_slice(&j->filled, 0, layer, 1);
    const mls_tensor tokens = mls_tensor_slice(&j->tokens, 0, layer, 1);
    const mls_tensor padding = mls_tensor_slice(&j->padding, 0, layer, 1);
    const size_t heads = filled.shape[1];
    for (size_t i = 0; i < heads; i++) {
        const size_t head = is_fresh ? heads - 1 - i : i;
        const mls_tensor to = mls_tensor_slice(&filled, 1, head, 1);
        const mls_tensor from = mls_tensor_slice(&tokens, 1, head, 1);
        if (j->populate) {
            size_t bytes = 0;
            (void)mls_tensor_bytes(
                &to, &bytes); /* cannot overflow: the whole target did not */
            if (j->inner_huge) {
                mls_advise_inner_huge_pages(to.data, bytes);
            }
            mls_populate_pages(to.data, bytes);
        }
        mls_copy(j->kernels, &to, &from, j->destination);
        if (j->pad != NULL) {
            const mls_tensor rest = mls_tensor_slice(&padding, 1, head, 1);
            mls_fill(j->kernels, &rest, *j->pad, j->destination);
        }
    }
}

/* The system keeps a record for each range of pages with its own advice, and allows
 * 65,530 of them in a process. */
enum { MOST_ADVISED = 4096 };

/* Threads share layers: there are enough of them, and each is large compared with the
 * cost of handing it out. */
void mls_kv_move(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *dst,
                 const mls_tensor *src, size_t position, const mls_element *pad,
                 mls_kv_memory memory)
{
    const size_t length = dst->shape[MLS_KV_AXIS];
    size_t bytes = 0;
    (void)mls_tensor_bytes(dst, &bytes);
    job j = {.kernels = kernels,
             .filled = mls_tensor_slice(dst, MLS_KV_AXIS, 0, position),
             .tokens = mls_tensor_slice(src, MLS_KV_AXIS, 0, position),
             .padding = mls_tensor_slice(dst, MLS_KV_AXIS, position, length - position),
             .pad = pad,
             .destination = {.bytes = bytes, .is_fresh = memory != MLS_KV_TOUCHED},
             .populate = memory == MLS_KV_SPARSE,
             .inner_huge = dst->shape[0] * dst->shape[1] <= MOST_ADVISED};
    mls_pool *shared = bytes >= MLS_POOL_COPY_BYTES ? pool : NULL;
    mls_pool_run(shared, move_layer, &j, dst->shape[0]);
}
