/* Stored byte ranges, compared with a list of the position of every element. */
#include "checkpoint/storage/stored_ranges.h"
#include "support/parts.h"
#include "support/random_bytes.h"

#include "safetensors/safetensors.h"

#include <stdlib.h>

enum { ELEMENTS = 240, ITEM = 4, ROW_RANGES = ELEMENTS };

static const size_t shape[] = {10, 6, 4};
static const uint32_t sum; /* of a place with checksums */
static mls_part random_part(void)
{
    static const mls_layout layouts[] = {
        {0},
        {1, {{0, 3}}},
        {1, {{1, 4}}},
        {1, {{2, 2}}},
        {1, {{MLS_LAYOUT_FLAT, 7}}},
        {2, {{1, 2}, {MLS_LAYOUT_FLAT, 3}}},
        {2, {{2, 2}, {0, 2}}},
    };
    const mls_layout layout = layouts[below(sizeof layouts / sizeof *layouts)];
    return part_at(layout, 3, shape, below(parts_of(layout)));
}

/* For each element of the tensor its position in a part, or SIZE_MAX. */
static void number(const mls_part *part, size_t out[ELEMENTS])
{
    size_t elements[ELEMENTS];
    for (size_t element = 0; element < ELEMENTS; element++) {
        out[element] = SIZE_MAX;
    }
    for (size_t i = elements_of(part, shape, elements); i-- > 0;) {
        out[elements[i]] = i;
    }
}

/* The visible ranges of a random layer over `count` elements; stores the position of
 * each, or SIZE_MAX. */
static size_t random_row_ranges(size_t count, mls_row_range *out, size_t *at, size_t *end)
{
    size_t range_count = 0, next = 0, place = below(3);
    for (size_t i = 0; i < count; i++) {
        at[i] = SIZE_MAX;
    }
    while (next < count) {
        const size_t begin = next + below(6) + (range_count > 0);
        const size_t most = 1 + below(9);
        if (begin >= count) {
            break;
        }
        const size_t length = most < count - begin ? most : count - begin;
        out[range_count++] = (mls_row_range){begin, length, place};
        for (size_t i = 0; i < length; i++) {
            at[begin + i] = place + i;
        }
        place += length + below(3); /* the elements in between are hidden */
        next = begin + length;
    }
    *end = place + below(3);
    return range_count;
}

/* A shard as a random layer, or whole, and the position of each element in its place. */
typedef struct stored {
    mls_stored_shard shard;
    mls_row_range row_ranges[ROW_RANGES];
    size_t at[ELEMENTS]; /* position of each element of the shard */
    size_t in_shard[ELEMENTS], in_selection[ELEMENTS];
    mls_part part, selection;
    size_t bytes;
} stored;

/* Of the current round, and a map of its bytes. */
static stored *s;
static size_t *map;

BEFORE_EACH
{
    s = calloc(1, sizeof *s);
    map = malloc((2 * ELEMENTS + 100) * ITEM * sizeof *map);
    REQUIRE(s != NULL && map != NULL);
}

AFTER_EACH
{
    free(map);
    free(s);
}

static void make(void)
{
    s->shard = (mls_stored_shard){
        .file = "x", .item_bytes = ITEM, .crcs = &sum, .part = &s->part};
    s->part = random_part();
    s->selection = random_part();
    const size_t count = mls_part_count(&s->part);
    size_t stored_rows = count;
    for (size_t i = 0; i < count; i++) {
        s->at[i] = i;
    }
    if (below(5) > 0) {
        s->shard.visible_count =
            random_row_ranges(count, s->row_ranges, s->at, &stored_rows);
        s->shard.visible = s->row_ranges;
    }
    s->shard.bytes = s->bytes = stored_rows * ITEM;
    s->shard.offset = 8;
    s->shard.file_bytes = 8 + s->bytes;
    number(&s->part, s->in_shard);
    number(&s->selection, s->in_selection);
}

/* Which byte of the requested part comes from byte `at` of the place; SIZE_MAX: none. */
static void map_bytes(void)
{
    for (size_t i = 0; i < s->bytes; i++) {
        map[i] = SIZE_MAX;
    }
    for (size_t element = 0; element < ELEMENTS; element++) {
        const size_t stored_offset = s->in_shard[element], to = s->in_selection[element];
        if (stored_offset != SIZE_MAX && to != SIZE_MAX &&
            s->at[stored_offset] != SIZE_MAX) {
            for (size_t i = 0; i < ITEM; i++) {
                map[s->at[stored_offset] * ITEM + i] = to * ITEM + i;
            }
        }
    }
}

TEST(stored_runs_match_element_offsets)
{
    for (int round = 0; round < 20000; round++) {
        make();
        map_bytes();
        const size_t from = below(3) ? 0 : below(s->bytes + 1);
        const size_t end = below(3) ? s->bytes : from + below(s->bytes - from + 1);
        mls_stored_runs runs;
        mls_stored_run run;
        size_t at = from;
        mls_stored_runs_init(&runs, &s->shard, &s->selection, from, end);
        while (mls_stored_runs_next(&runs, &run)) {
            REQUIRE(run.count > 0 && run.at >= at && run.at + run.count <= end);
            while (at < run.at) {
                CHECK(map[at++] == SIZE_MAX);
            }
            for (size_t i = 0; i < run.count; i++) {
                CHECK(map[at++] == run.to + i);
            }
        }
        while (at < end) {
            CHECK(map[at++] == SIZE_MAX);
        }
        CHECK(!mls_stored_runs_next(&runs, &run));
    }
}

TEST(ranges_cover_the_requested_part)
{
    for (int round = 0; round < 20000; round++) {
        make();
        map_bytes();
        size_t first = SIZE_MAX, last = 0, all = 0;
        mls_stored_range range = {0};
        for (size_t i = 0; i < s->bytes; i++) {
            if (map[i] != SIZE_MAX) {
                first = first == SIZE_MAX ? i : first;
                last = i + 1;
                all++;
            }
        }
        const bool some = mls_stored_range_of(&s->shard, &s->selection, &range);
        CHECK(some == (all > 0));
        CHECK(!some || (range.from == first && range.end >= last &&
                        range.end <= s->bytes && range.to == map[first]));
        CHECK(!range.together || range.end == last);
        for (size_t i = first; range.together && i < last; i++) {
            CHECK(map[i] == range.to + (i - first));
        }
        const mls_stored_reads unverified =
            mls_stored_reads_of(&s->shard, &s->selection, false);
        CHECK(unverified.bytes == all);
        CHECK(all == 0 || (unverified.begin == 8 + first && unverified.end == 8 + last));
        const mls_stored_reads verified =
            mls_stored_reads_of(&s->shard, &s->selection, true);
        CHECK(verified.bytes == (all == 0 ? 0 : s->bytes)); /* in a single block */
        s->shard.crcs = NULL;
        CHECK(mls_stored_reads_of(&s->shard, &s->selection, true).bytes == all);
    }
}

TEST(verified_reads_take_each_block_once)
{
    enum { BLOCK = MLS_SAFETENSORS_BLOCK };
    const mls_row_range visible[] = {{0, 10, 0}, {20, 10, 100}, {40, 5, 3 * BLOCK - 2}};
    const mls_part part = {.rank = 1, .length = {1000}, .end = 1000};
    const mls_stored_shard shard = {.file = "x",
                                    .crcs = &sum,
                                    .file_bytes = SIZE_MAX,
                                    .offset = 4096,
                                    .item_bytes = 1,
                                    .bytes = 3 * BLOCK + 50,
                                    .visible = visible,
                                    .visible_count = 3,
                                    .part = &part};
    const mls_stored_reads reads = mls_stored_reads_of(&shard, &part, true);
    CHECK(reads.begin == 4096 && reads.end == 4096 + 3 * BLOCK + 50);
    CHECK(reads.bytes == 2 * BLOCK + 50); /* all but the second */
}

TEST(stored_bytes_must_fit_the_file)
{
    size_t bytes = 0;
    mls_part part = {.rank = 1, .length = {10}, .end = 10};
    mls_stored_shard shard = {
        .file = "x", .file_bytes = 100, .offset = 60, .item_bytes = 4, .part = &part};
    CHECK(mls_stored_bytes(&shard, &bytes) && bytes == 40);
    shard.offset++;
    CHECK(!mls_stored_bytes(&shard, &bytes));
    shard.offset = UINT64_MAX;
    CHECK(!mls_stored_bytes(&shard, &bytes));
    shard.file = NULL;
    CHECK(mls_stored_bytes(&shard, &bytes) && bytes == 40);
    part.end = SIZE_MAX;
    CHECK(!mls_stored_bytes(&shard, &bytes));
}

TEST(a_failure_names_the_tensor_and_its_file)
{
    const mls_stored_shard shard = {.file = "shards/a", .name = {"weight", 6}},
                           zeros = {.name = {"bias", 4}};
    mls_fail_at(&status, 7, "it is damaged");
    mls_status_got(&status, "nonsense");
    CHECK(mls_stored_blame(&shard, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "tensor 'weight', file 'shards/a': it is damaged");
    CHECK_TEXT(status.name, "weight");
    CHECK_TEXT(status.got, "nonsense");
    CHECK(status.has_offset && status.offset == 7);
    mls_fail(&status, MLS_E_MEMORY, "no memory");
    CHECK(mls_stored_blame(&zeros, &status) == MLS_E_MEMORY);
    CHECK_TEXT(status.text, "tensor 'bias', file '': no memory");
}
