#include "kv/kv_transition.h"
#include "support/cpus.h"
#include "support/tensors.h"

enum { RANK = 4, AXIS = 2 };

static const size_t shape[RANK] = {2, 3, 8, 4};

static const mls_kv_names names = {.source = "from",
                                   .target = "to",
                                   .target_length = "length",
                                   .position = "position",
                                   .if_shorter = "compact",
                                   .if_shared = "copy"};

static mls_code check(mls_kv_kind kind, int64_t target, int64_t position)
{
    const mls_kv_request request = {kind, target, position, AXIS, &names, NULL, 0};
    return mls_kv_check(RANK, shape, request, &status);
}

TEST(requests_that_cannot_work_are_refused)
{
    CHECK(check(MLS_KV_EXPAND, 8, 8) == MLS_OK);
    CHECK(check(MLS_KV_EXPAND, 7, 2) == MLS_E_CAPACITY);
    CHECK(strstr(status.text, ": compact") != NULL);
    CHECK(check(MLS_KV_COMPACT, 7, 2) == MLS_OK);
    CHECK(check(MLS_KV_COMPACT, 20, 8) == MLS_OK);
    CHECK(check(MLS_KV_EXPAND, 10, -1) == MLS_E_CAPACITY);
    CHECK(check(MLS_KV_EXPAND, 10, 9) == MLS_E_CAPACITY);
    CHECK_TEXT(status.expected, "0..8");
    CHECK_TEXT(status.got, "9");
    CHECK(check(MLS_KV_COMPACT, 4, 5) == MLS_E_CAPACITY);
    CHECK(strstr(status.text, "at least 5") != NULL);
    CHECK(check(MLS_KV_COMPACT, -4, 0) == MLS_E_CAPACITY);
    CHECK(strchr(status.text, '(') == NULL); /* the usual layout needs no note */
    const mls_kv_request other = {MLS_KV_EXPAND, 3, 1, 3, &names, NULL, 0};
    CHECK(mls_kv_check(RANK, shape, other, &status) == MLS_E_CAPACITY);
    CHECK(strstr(status.text,
                 "the source's 4 (sequence axis 3 of shape (2, 3, 8, 4)): ") != NULL);
}

TEST(axes_are_counted_from_both_ends)
{
    const size_t ones[MLS_KV_MAX_RANK + 1] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (int rank = 0; rank <= MLS_KV_MAX_RANK + 1; rank++) {
        for (int64_t requested = -11; requested <= 11; requested++) {
            const bool is_rank = rank >= MLS_KV_MIN_RANK && rank <= MLS_KV_MAX_RANK;
            const bool is_axis = requested >= -rank && requested < rank;
            int axis = -100;
            const mls_code code =
                mls_kv_find_axis("it", rank, ones, "its axis", requested, &axis, &status);
            CHECK(code == (is_rank && is_axis ? MLS_OK : MLS_E_SHAPE));
            CHECK(axis == (code != MLS_OK  ? -100
                           : requested < 0 ? rank + (int)requested
                                           : (int)requested));
        }
    }
    int axis;
    CHECK(mls_kv_find_axis("it", 1, shape, "at", 0, &axis, &status) == MLS_E_SHAPE);
    CHECK_TEXT(status.expected, "2 to 8 dimensions");
    CHECK_TEXT(status.got, "(2,)");
    CHECK(mls_kv_find_axis("it", RANK, shape, "at", INT64_MIN, &axis, &status) ==
          MLS_E_SHAPE);
    CHECK(mls_kv_find_axis("it", RANK, shape, "at", 4, &axis, &status) == MLS_E_SHAPE);
    CHECK_TEXT(status.text,
               "at 4 is outside -4..3: it has 4 dimensions, shape (2, 3, 8, 4)");
}

static mls_code check_shapes(int source_rank, const size_t *source, int target_rank,
                             const size_t *target, int64_t axis)
{
    return mls_kv_check_shapes(source_rank, source, target_rank, target, "axis", axis,
                               &status);
}

TEST(shapes_of_two_models_must_agree)
{
    size_t other[9] = {2, 3, 16, 4, 1, 1, 1, 1, 1};
    CHECK(check_shapes(4, shape, 4, other, -2) == MLS_OK);
    CHECK(check_shapes(4, other, 4, shape, 2) == MLS_E_CAPACITY);
    CHECK(check_shapes(1, other, 4, shape, -2) == MLS_E_SHAPE);
    CHECK(check_shapes(4, shape, 9, other, -2) == MLS_E_SHAPE);
    CHECK(check_shapes(4, shape, 4, other, 4) == MLS_E_SHAPE);
    CHECK(check_shapes(4, shape, 5, other, -2) == MLS_E_SHAPE);
    CHECK(strstr(status.text, "dimensions differ: the source has 4, the target 5") ==
          status.text);
    CHECK(check_shapes(4, shape, 4, other, -1) == MLS_E_SHAPE);
    CHECK(strstr(status.text, "lengths of axis 2 differ: the source has 8, the target 16 "
                              "(sequence axis 3 of shape (2, 3, 8, 4))") == status.text);
    other[1] = 9;
    CHECK(check_shapes(4, shape, 4, other, -2) == MLS_E_SHAPE);
    CHECK(strstr(status.text, "heads") == status.text);
}

/* Fill memory with distinct words and return a view of a shape of it. */
static mls_tensor numbered(uint16_t *words, int rank, const size_t *dimensions)
{
    size_t count = 1;
    for (int axis = 0; axis < rank; axis++) {
        count *= dimensions[axis];
    }
    for (size_t i = 0; i < count; i++) {
        words[i] = (uint16_t)(i * 2654435761U >> 7);
    }
    return tensor_of(words, MLS_U16, rank, dimensions);
}

/* Whether dst has the tokens of src and 9 elsewhere; both are C-contiguous. */
static bool is_moved(const mls_tensor *dst, const mls_tensor *src, int axis,
                     size_t position)
{
    size_t outer = 1, inner = 1;
    for (int i = 0; i < axis; i++) {
        outer *= dst->shape[i];
    }
    for (int i = axis + 1; i < dst->rank; i++) {
        inner *= dst->shape[i];
    }
    const uint16_t *to = (const uint16_t *)(const void *)dst->data;
    const uint16_t *from = (const uint16_t *)(const void *)src->data;
    const size_t row = dst->shape[axis] * inner, source_row = src->shape[axis] * inner;
    for (size_t i = 0; i < outer * row; i++) {
        const size_t at = i % row;
        const uint16_t want = at < position * inner ? from[i / row * source_row + at] : 9;
        if (to[i] != want) {
            return false;
        }
    }
    return true;
}

/* Caches with 1, 2 and many rows, short and long, below and above the size at which
 * threads share them. */
TEST(every_axis_moves_with_threads_too)
{
    static const size_t shapes[][5] = {{3, 1, 2, 5, 7},      {1, 1, 1, 1, 1},
                                       {2, 300, 1, 3, 1700}, {700, 5, 900, 1, 1},
                                       {1, 1, 70, 70, 700},  {1, 3200, 1, 1, 1000},
                                       {40, 1, 80000, 1, 1}};
    enum { WORDS = 8 << 20 };
    static uint16_t from[WORDS], to[WORDS];
    mls_pool *pool = NULL;
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int axis = 0; axis < 5; axis++) {
            size_t longer[5];
            memcpy(longer, shapes[i], sizeof longer);
            longer[axis] = shapes[i][axis] * 2 + 1;
            size_t words = 1;
            for (int j = 0; j < 5; j++) {
                words *= longer[j];
            }
            if (words > WORDS) {
                continue;
            }
            const mls_tensor src = numbered(from, 5, shapes[i]);
            const mls_tensor dst = numbered(to, 5, longer);
            const size_t positions[] = {0, shapes[i][axis] / 2, shapes[i][axis]};
            for (int j = 0; j < 3; j++) {
                mls_element pad;
                REQUIRE(mls_element_encode(9, &dst, &pad, &status) == MLS_OK);
                const mls_kv_request request = {.position = (int64_t)positions[j],
                                                .axis = axis,
                                                .pad = &pad,
                                                .memory = (mls_kv_memory)j};
                mls_kv_move(mls_kernels_of(best_cpu()), j == 1 ? NULL : pool, &dst, &src,
                            &request);
                CHECK(is_moved(&dst, &src, axis, positions[j]));
            }
        }
    }
    mls_pool_free(pool);
}

TEST(padding_is_left_alone_if_none_is_asked_for)
{
    static uint16_t from[2 * 3 * 8 * 4], to[2 * 3 * 16 * 4];
    const size_t large[RANK] = {2, 3, 16, 4};
    const mls_tensor src = numbered(from, RANK, shape);
    const mls_tensor dst = numbered(to, RANK, large);
    memset(to, 0xEE, sizeof to);
    const mls_kv_request request = {.position = 2, .axis = AXIS, .memory = MLS_KV_SPARSE};
    mls_kv_move(mls_kernels_of(MLS_CPU_SCALAR), NULL, &dst, &src, &request);
    CHECK(to[8] == 0xEEEE && to[7] == from[7]);
}

TEST(targets_are_checked_before_writing)
{
    enum { ITEMS = 2 * 3 * 8 * 4 };
    static uint16_t memory[ITEMS * 4];
    const size_t large[RANK] = {2, 3, 16, 4};
    const mls_kv_request request = {MLS_KV_EXPAND, 16, 8, AXIS, &names, NULL, 0};
    const mls_tensor src = tensor_of(memory, MLS_U16, 4, shape);
    mls_tensor dst = tensor_of(memory + 1, MLS_U16, 4, large);
    CHECK(mls_kv_check_target(&dst, &src, request, &status) == MLS_E_OVERLAP);
    CHECK_TEXT(status.text, "to shares memory with from: copy");
    dst = tensor_of(memory + ITEMS, MLS_U16, 4, large);
    CHECK(mls_kv_check_target(&dst, &src, request, &status) == MLS_OK);
    dst.shape[2] = 15;
    CHECK(mls_kv_check_target(&dst, &src, request, &status) == MLS_E_SHAPE);
    CHECK_TEXT(status.expected, "(2, 3, 16, 4)");
    dst.shape[2] = 16;
    dst.dtype = MLS_F16;
    CHECK(mls_kv_check_target(&dst, &src, request, &status) == MLS_E_DTYPE);
}

/* Fill bytes with a pattern that no padding of the tests has. */
static void number_bytes(unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bytes[i] = (unsigned char)(i * 37 + 11);
    }
}

enum { MOST_ROW = 96, MOST_ROWS = 5, MARGIN = 32 };

/* Whether the kernel writes the rows as the scalar loops would, and
 * nothing around them. */
static bool rows_are_padded(const mls_kernels *kernels, size_t used, size_t row,
                            size_t rows, size_t src_step, size_t src_shift, mls_store how)
{
    static unsigned char from[MOST_ROWS * (MOST_ROW + 8) + 16];
    static _Alignas(64) unsigned char got[MARGIN + MOST_ROWS * MOST_ROW + MARGIN];
    static unsigned char want[sizeof got];
    const uint64_t pattern = 0x8877665544332211U;
    number_bytes(from, sizeof from);
    memset(got, 0xEE, sizeof got);
    memset(want, 0xEE, sizeof want);
    for (size_t i = 0; i < rows; i++) {
        unsigned char *const to = want + MARGIN + i * row;
        memcpy(to, from + src_shift + i * src_step, used);
        for (size_t at = used; at < row; at++) {
            to[at] = ((const unsigned char *)&pattern)[at % 8];
        }
    }
    kernels->pad_rows(got + MARGIN, from + src_shift, src_step, used, row, rows, pattern,
                      how);
    return memcmp(got, want, sizeof got) == 0;
}

/* Every number of token bytes and every row length, at any alignment of the source. The
 * pattern of the padding stays aligned to the row: an element is not torn. */
TEST(row_kernels_copy_tokens_and_pad)
{
    EACH_CPU (cpu) {
        const mls_kernels *kernels = mls_kernels_of(cpu);
        if (kernels->pad_rows == NULL) {
            continue;
        }
        for (size_t row = 16; row <= MOST_ROW; row += 16) {
            for (size_t used = 0; used <= row; used += EVERY(3)) {
                for (size_t rows = 1; rows <= MOST_ROWS; rows += 2) {
                    for (int i = MLS_STORE_CACHED; i <= MLS_STORE_STREAM; i++) {
                        const mls_store how = (mls_store)i;
                        CHECK(rows_are_padded(kernels, used, row, rows, used, used % 16,
                                              how));
                        CHECK(
                            rows_are_padded(kernels, used, row, rows, used + 8, 0, how));
                    }
                }
            }
        }
    }
}

/* The sequence is innermost and stores go past the cache, so rows take the kernel if the
 * processor has one; a length that is not a multiple of 16 bytes takes the other way. */
TEST(innermost_rows_move_past_the_cache)
{
    enum { ROWS = 6000, LONGEST = 400, WORDS = ROWS * LONGEST };
    static uint16_t from[WORDS], to[WORDS];
    static mls_store_choices choices;
    static const char *const stores[] = {"plain", "loop", "stream1"};
    static const size_t lengths[][2] = {
        {40, 80}, {33, 96}, {50, 101}, {104, 400}, {300, 304}};
    for (size_t i = 0; i < sizeof stores / sizeof stores[0]; i++) {
        mls_kernels kernels = *mls_kernels_of(best_cpu());
        REQUIRE(mls_store_choices_init(&choices, stores[i], &status) == MLS_OK);
        choices.least[MLS_STORING_WITHIN] = 1; /* stage the rows of small results too */
        kernels.choices = &choices;
        for (size_t j = 0; j < sizeof lengths / sizeof lengths[0]; j++) {
            const size_t before[] = {2, ROWS / 2, lengths[j][0]};
            const size_t after[] = {2, ROWS / 2, lengths[j][1]};
            const mls_tensor src = numbered(from, 3, before);
            const mls_tensor dst = numbered(to, 3, after);
            const size_t positions[] = {0, 7, before[2]};
            for (int k = 0; k < 3; k++) {
                mls_element pad;
                REQUIRE(mls_element_encode(9, &dst, &pad, &status) == MLS_OK);
                const mls_kv_request request = {
                    .position = (int64_t)positions[k], .axis = 2, .pad = &pad};
                mls_kv_move(&kernels, NULL, &dst, &src, &request);
                CHECK(is_moved(&dst, &src, 2, positions[k]));
            }
        }
    }
}
