#include "array/overlap.h"
#include "state/load_into.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/tensors.h"
#include "support/text.h"

#include <stdint.h>
#include <stdlib.h>

enum { SMALL = 4096, LARGE = 8 << 20, MOST_THREADS = 4 };

static unsigned char small[SMALL], before[SMALL];
static unsigned char from_bytes[2 * LARGE], to_bytes[2 * LARGE];

static mls_load_into_pair pair(const char *name, const mls_tensor *dst,
                               const mls_tensor *src)
{
    return (mls_load_into_pair){.name = text(name), .dst = dst, .src = src};
}

/* Load with a number of threads; returns false if it was refused. */
static bool load(const mls_load_into_pair *pairs, size_t count, size_t threads)
{
    mls_load_into *plan = NULL;
    mls_pool *pool = NULL;
    mls_status st;
    const bool ready =
        mls_pool_new(threads, &pool, &st) == MLS_OK &&
        mls_load_into_new(pairs, count, true, threads, &plan, &st) == MLS_OK;
    if (ready) {
        mls_load_into_run(plan, mls_kernels_of(best_cpu()), pool);
    }
    mls_load_into_free(plan);
    mls_pool_free(pool);
    return ready;
}

/* The code of a refusal that must leave everything unchanged. */
static mls_code refusal(const mls_load_into_pair *pairs, size_t count, bool cast,
                        mls_status *st)
{
    mls_load_into *plan = NULL;
    memcpy(before, small, sizeof small);
    const mls_code code = mls_load_into_new(pairs, count, cast, 1, &plan, st);
    CHECK(code != MLS_OK && st->code == code && plan == NULL);
    CHECK(memcmp(before, small, sizeof small) == 0);
    return code;
}

/* ---- refusals ---- */

TEST(shapes_and_dtypes_are_refused_by_name)
{
    fill_random(small, sizeof small, 1);
    const mls_tensor good = matrix_of(small, MLS_F32, 4, 4);
    const mls_tensor source = matrix_of(small + 1024, MLS_F32, 4, 4);
    const mls_tensor flat = matrix_of(small + 1024, MLS_F32, 2, 8);
    const mls_tensor half = matrix_of(small + 2048, MLS_F16, 4, 4);
    const mls_tensor other_dtype = matrix_of(small + 2048, MLS_I32, 4, 4);
    mls_tensor vector = flat;
    mls_load_into_pair pairs[2] = {pair("first", &good, &source),
                                   pair("second", &half, &flat)};
    CHECK(refusal(pairs, 2, true, &status) ==
          MLS_E_SHAPE); /* the shape is checked first */
    CHECK_TEXT(status.name, "second");
    CHECK_TEXT(status.expected, "(2, 8)");
    CHECK_TEXT(status.got, "(4, 4)");
    CHECK(strstr(status.text, "'second'") != NULL);
    vector.rank = 1;
    pairs[1].dst = &vector;
    CHECK(refusal(pairs, 2, true, &status) == MLS_E_SHAPE);
    CHECK_TEXT(status.got, "(2,)");

    pairs[1] = pair("third", &half, &source);
    CHECK_FAILS(refusal(pairs, 2, false, &status), MLS_E_DTYPE,
                "'third': the target has dtype float16, the source float32, and nothing "
                "is converted");
    CHECK_TEXT(status.name, "third");
    CHECK_TEXT(status.expected, "float32");
    CHECK_TEXT(status.got, "float16");
    CHECK(strstr(status.text, "nothing is converted") != NULL);
    pairs[1].dst = &other_dtype;
    for (int cast = 0; cast < 2; cast++) { /* casting does not help */
        CHECK(refusal(pairs, 2, cast != 0, &status) == MLS_E_DTYPE);
        CHECK_TEXT(status.name, "third");
        CHECK(strstr(status.text, "cast=") == NULL);
    }
}

TEST(target_overlapping_its_source_is_refused)
{
    mls_tensor target = matrix_of(small, MLS_F32, 8, 8);
    mls_tensor source = matrix_of(small + 128, MLS_F32, 8, 8);
    mls_load_into_pair overlapping = pair("weight", &target, &source);
    CHECK_FAILS(refusal(&overlapping, 1, true, &status), MLS_E_OVERLAP,
                "'weight': the target shares memory with its own source but is another "
                "view of it: load from a copy");
    CHECK_TEXT(status.name, "weight");
    source = target; /* transposed, byte-swapped, or of another kind: no longer the same
                        view */
    source.strides[0] = target.strides[1], source.strides[1] = target.strides[0];
    CHECK(refusal(&overlapping, 1, true, &status) == MLS_E_OVERLAP);
    source = target;
    source.swapped = true;
    CHECK(refusal(&overlapping, 1, true, &status) == MLS_E_OVERLAP);
    source = matrix_of(small, MLS_F64, 8, 8);
    CHECK(refusal(&overlapping, 1, true, &status) == MLS_E_OVERLAP);
    source = target;
    source.data += 7 * 32, source.strides[0] = -32;
    CHECK(refusal(&overlapping, 1, true, &status) == MLS_E_OVERLAP);
}

TEST(target_sharing_memory_with_a_source_is_refused_with_both_names)
{
    const mls_tensor a = matrix_of(small, MLS_F32, 8, 8);
    const mls_tensor b = matrix_of(small + 1024, MLS_F32, 8, 8);
    const mls_tensor c = matrix_of(small + 2048, MLS_F32, 8, 8);
    const mls_tensor over_c = matrix_of(small + 2048 + 252, MLS_F32, 8, 8);
    const mls_load_into_pair swapped[2] = {pair("a", &a, &b), pair("b", &b, &a)};
    CHECK_FAILS(refusal(swapped, 2, false, &status), MLS_E_OVERLAP,
                "'a': the target shares memory with the source of 'b': load from a copy");
    CHECK_TEXT(status.name, "a");

    mls_load_into_pair chained[2] = {pair("here", &a, &b), pair("there", &over_c, &a)};
    CHECK(refusal(chained, 2, false, &status) == MLS_E_OVERLAP);
    CHECK_TEXT(status.name, "here");
    CHECK(strstr(status.text, "'there'") != NULL);
    /* a source that is its own target must keep its content */
    chained[0] = pair("kept", &c, &c);
    chained[1] = pair("moved", &over_c, &a);
    CHECK(refusal(chained, 2, false, &status) == MLS_E_OVERLAP);
    CHECK_TEXT(status.name, "moved");
    CHECK(strstr(status.text, "'kept'") != NULL);
}

TEST(both_names_are_seen_however_long_they_are)
{
    char long_a[602] = "a", long_b[602] = "b";
    for (size_t i = 1; i < 601;
         i += 3) { /* characters of three bytes, truncated in the middle */
        memcpy(long_a + i, "\xE2\x82\xAC", 3);
        memcpy(long_b + i, "\xE2\x86\x92", 3);
    }
    const mls_tensor a = matrix_of(small, MLS_U8, 8, 8),
                     b = matrix_of(small + 64, MLS_U8, 8, 8);
    const mls_load_into_pair pairs[2] = {pair(long_a, &a, &b), pair(long_b, &b, &a)};
    CHECK(refusal(pairs, 2, false, &status) == MLS_E_OVERLAP);
    CHECK(strstr(status.text, "\xE2\x82\xAC...'") != NULL);
    CHECK(strstr(status.text, "\xE2\x86\x92...'") != NULL);
    CHECK(mls_utf8_valid(status.text, strlen(status.text)));
    const mls_load_into_pair nameless[2] = {{.name = {NULL, 0}, .dst = &a, .src = &b},
                                            {.name = {NULL, 0}, .dst = &b, .src = &a}};
    CHECK(refusal(nameless, 2, false, &status) == MLS_E_OVERLAP);
    CHECK(strstr(status.text, "''") != NULL);
}

TEST(self_overlapping_targets_are_refused)
{
    mls_tensor target = matrix_of(small, MLS_F32, 4, 8);
    const mls_tensor source = matrix_of(small + 1024, MLS_F32, 4, 8);
    const mls_load_into_pair overlapping = pair("wide", &target, &source);
    target.strides[0] = 0; /* broadcast */
    CHECK_FAILS(refusal(&overlapping, 1, false, &status), MLS_E_OVERLAP,
                "'wide': elements of the target share memory with one another, as in a "
                "broadcast view: load into a copy of it");
    CHECK_TEXT(status.name, "wide");
    target.strides[0] = 4; /* windows */
    CHECK(refusal(&overlapping, 1, false, &status) == MLS_E_OVERLAP);
    target.strides[0] = -28;
    CHECK(refusal(&overlapping, 1, false, &status) == MLS_E_OVERLAP);
    target.strides[0] = PTRDIFF_MIN; /* no sum may overflow */
    CHECK(refusal(&overlapping, 1, false, &status) == MLS_E_OVERLAP);
    target.strides[0] = 32, target.strides[1] = 2; /* overlapping items */
    CHECK(refusal(&overlapping, 1, false, &status) == MLS_E_OVERLAP);
}

/* ---- pairs that are skipped ---- */

TEST(a_target_that_is_its_source_is_left_out)
{
    fill_random(small, sizeof small, 2);
    memcpy(before, small, sizeof small);
    const mls_tensor tensor = matrix_of(small, MLS_F32, 4, 8);
    const mls_tensor bytes = matrix_of(small + 512, MLS_U8, 4, 8);
    mls_tensor wide = matrix_of(small + 1024, MLS_F32, 4, 8);
    mls_tensor turned = bytes, row = matrix_of(small + 2048, MLS_F32, 1, 8);
    mls_tensor same_row = row;
    wide.strides[0] = 0;       /* not written, so this is valid */
    turned.swapped = true;     /* a byte has no byte order */
    same_row.strides[0] = 999; /* one index: the stride is not used */
    const mls_load_into_pair pairs[] = {
        pair("plain", &tensor, &tensor), pair("tied", &tensor, &tensor),
        pair("bytes", &bytes, &turned), pair("wide", &wide, &wide),
        pair("row", &row, &same_row)};
    mls_load_into *plan = NULL;
    REQUIRE(mls_load_into_new(pairs, 5, false, 1, &plan, &status) == MLS_OK);
    CHECK(mls_load_into_bytes(plan) == 0);
    mls_load_into_run(plan, mls_kernels_of(best_cpu()), NULL);
    mls_load_into_free(plan);
    CHECK(memcmp(before, small, sizeof small) == 0);
}

TEST(empty_lists_and_empty_tensors_load)
{
    mls_tensor none = matrix_of(NULL, MLS_F32, 0, 8),
               inside = matrix_of(small, MLS_F32, 0, 8);
    mls_tensor source = matrix_of(small, MLS_F32, 2, 2),
               target = matrix_of(small + 64, MLS_F32, 2, 2);
    const mls_load_into_pair pairs[] = {pair("none", &none, &inside),
                                        pair("t", &target, &source),
                                        pair("inside", &inside, &none)};
    mls_load_into *plan = NULL;
    CHECK(load(NULL, 0, 2));
    fill_random(small, sizeof small, 3);
    REQUIRE(mls_load_into_new(pairs, 3, false, 1, &plan, &status) == MLS_OK);
    CHECK(mls_load_into_bytes(plan) == 16);
    mls_load_into_run(plan, mls_kernels_of(best_cpu()), NULL);
    CHECK(memcmp(small, small + 64, 16) == 0);
    mls_load_into_free(plan);
    mls_load_into_free(NULL);
    target.rank = source.rank = 0; /* scalars */
    small[0] ^= 1;
    CHECK(load(&pairs[1], 1, 1));
    CHECK(memcmp(small, small + 64, 16) == 0);
}

/* ---- threads ---- */

TEST(tied_targets_are_written_in_the_order_of_the_pairs)
{
    enum { BYTES = 3 << 20 };
    fill_random(from_bytes, sizeof from_bytes, 7);
    /* an array, its second half, and an unrelated neighbour */
    const mls_tensor full = matrix_of(to_bytes, MLS_U8, 3, 1 << 20);
    const mls_tensor half = matrix_of(to_bytes + BYTES / 2, MLS_U8, 1, BYTES / 2);
    const mls_tensor beside = matrix_of(to_bytes + BYTES, MLS_U8, 1, LARGE);
    const mls_tensor whole_from = matrix_of(from_bytes, MLS_U8, 3, 1 << 20);
    const mls_tensor half_from = matrix_of(from_bytes + 99, MLS_U8, 1, BYTES / 2);
    const mls_tensor beside_from = matrix_of(from_bytes + 7, MLS_U8, 1, LARGE);
    const mls_load_into_pair pairs[3] = {pair("whole", &full, &whole_from),
                                         pair("beside", &beside, &beside_from),
                                         pair("half", &half, &half_from)};
    for (size_t threads = 1; threads <= MOST_THREADS; threads++) {
        for (int turned = 0; turned < 2; turned++) { /* either may be the last one */
            mls_load_into_pair order[3] = {pairs[0], pairs[1], pairs[2]};
            if (turned != 0) {
                order[0] = pairs[2], order[2] = pairs[0];
            }
            memset(to_bytes, 0xA5, sizeof to_bytes);
            CHECK(load(order, 3, threads));
            CHECK(memcmp(to_bytes, from_bytes, BYTES / 2) == 0);
            CHECK(memcmp(half.data, turned ? from_bytes + BYTES / 2 : half_from.data,
                         BYTES / 2) == 0);
            CHECK(memcmp(beside.data, beside_from.data, LARGE) == 0);
            CHECK(to_bytes[BYTES + LARGE] == 0xA5);
        }
    }
}

/* ---- the sweep compared with testing all pairs ---- */

enum { FEW = 7 };

/* The expected result of mls_load_into_new for targets and sources that are never the
 * same view.
 */
static bool collides(const mls_tensor *targets, const mls_tensor *sources, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < count; j++) {
            if (mls_tensor_overlap(&targets[i], &sources[j])) {
                return true;
            }
        }
    }
    return false;
}

TEST(the_sweep_agrees_with_comparing_all)
{
    uint64_t seed = 10;
    size_t refused = 0, loaded = 0;
    for (int round = 0; round < 20000; round++) {
        mls_tensor targets[FEW], sources[FEW];
        mls_load_into_pair pairs[FEW];
        const size_t count = 1 + random_next(&seed) % FEW;
        unsigned char expected[SMALL];
        mls_load_into *plan = NULL;
        for (size_t i = 0; i < count; i++) {
            const size_t bytes = random_next(&seed) % 40;
            /* even rounds keep targets and sources apart */
            const size_t shift = round % 2 == 0 ? 512 : 120;
            targets[i] = matrix_of(small + random_next(&seed) % 400, MLS_U8, 1, bytes);
            sources[i] =
                matrix_of(small + shift + 1 + random_next(&seed) % 400, MLS_U8, 1, bytes);
            pairs[i] = pair("x", &targets[i], &sources[i]);
            if (targets[i].data == sources[i].data) {
                sources[i].data += 401;
            }
        }
        memcpy(expected, small, sizeof small);
        const mls_code code = mls_load_into_new(pairs, count, false, 1, &plan, &status);
        CHECK((code == MLS_E_OVERLAP) == collides(targets, sources, count));
        if (code == MLS_OK) {
            for (size_t i = 0; i < count; i++) {
                memcpy(expected + (targets[i].data - small), sources[i].data,
                       targets[i].shape[1]);
            }
            mls_load_into_run(plan, mls_kernels_of(best_cpu()), NULL);
            loaded++;
        }
        refused += code == MLS_E_OVERLAP;
        CHECK(memcmp(expected, small, sizeof small) == 0);
        mls_load_into_free(plan);
    }
    CHECK(refused > 1000 && loaded > 1000);
}
