/* Staging: which items fit, that the copies are exact, and that the owner of the others
 * is notified at the right moment. */
#include "checkpoint/write/staging.h"
#include "support/shards.h"

enum { COUNT = 6, MIB = 1 << 20 };

/* A state of six items: packed and strided, odd sizes, one without elements, one larger
 * than several pieces. */
typedef struct state {
    mls_shard_item items[COUNT];
    size_t shapes[COUNT][2];
    size_t bytes[COUNT];
    unsigned char *data[COUNT];
    mls_tensor strided;
} state;

static const size_t sizes[COUNT] = {5 * MIB / 4 + 3, 0, 7, 1000, 999, 300 * 401};

static state s; /* of the current test */

static void make_state(void)
{
    static const char *const names[COUNT] = {"large", "empty", "a", "b", "c", "strided"};
    for (size_t i = 0; i < COUNT; i++) {
        s.shapes[i][0] = sizes[i];
        s.bytes[i] = sizes[i] * 4;
        s.data[i] = noise(s.bytes[i] * 2);
        s.items[i] = item_of(names[i], NULL, MLS_F32, 1, s.shapes[i], s.data[i]);
    }
    /* every second element, backwards */
    s.strided = (mls_tensor){.data = s.data[5] + 8 * (sizes[5] - 1),
                             .dtype = MLS_F32,
                             .rank = 1,
                             .shape = {sizes[5]},
                             .strides = {-8}};
    s.items[5].data = NULL;
    s.items[5].strided = &s.strided;
}

static void free_state(void)
{
    for (size_t i = 0; i < COUNT; i++) {
        free(s.data[i]);
    }
}

/* For a test that changed the state. */
static void renew_state(void)
{
    free_state();
    make_state();
}

BEFORE_EACH
{
    make_state();
}

AFTER_EACH
{
    free_state();
    empty_pool();
}

/* Whether a staged copy equals the state. */
static bool copy_is_good(const mls_shard_item *item, size_t number)
{
    bool good = item->data != NULL && item->strided == NULL && item->first == 0;
    for (size_t i = 0; good && i < sizes[number]; i++) {
        const unsigned char *from =
            number == 5 ? s.data[5] + 8 * (sizes[5] - 1 - i) : s.data[number] + 4 * i;
        good = memcmp(item->data + 4 * i, from, 4) == 0;
    }
    return good;
}

/* Stage with a budget; checks each copy, and returns the number of copied items. */
static size_t stage(size_t budget, bool threads, mls_staged *staged)
{
    mls_status st;
    size_t copied = 0;
    renew_state();
    unsigned char *memory = malloc(budget + 17);
    memset(memory, 0x5A, budget + 17);
    const mls_staging to = {.memory = memory + 1, /* unaligned */
                            .bytes = budget,
                            .kernels = kernels,
                            .pool = threads ? four_threads : NULL};
    CHECK(mls_stage(&to, s.items, COUNT, staged, &st) == MLS_OK);
    CHECK(staged->bytes <= budget && memory[0] == 0x5A);
    for (size_t i = staged->bytes + 1; i < budget + 17; i++) {
        if (memory[i] != 0x5A) {
            CHECK(false && "written behind what is in use");
            break;
        }
    }
    for (size_t i = 0; i < COUNT; i++) {
        copied += s.items[i].staged;
        CHECK(!s.items[i].staged || copy_is_good(&s.items[i], i));
    }
    CHECK(copied + staged->lent == COUNT);
    free(memory);
    return copied;
}

TEST(full_budget_stages_every_item)
{
    size_t all = 0;
    mls_staged staged;
    for (size_t i = 0; i < COUNT; i++) {
        all += 4 * sizes[i];
    }
    CHECK(stage(all, true, &staged) == COUNT && staged.bytes == all && staged.lent == 0);
    CHECK(stage(all, false, &staged) == COUNT && staged.bytes == all);
    CHECK(stage(all + 100, true, &staged) == COUNT && staged.bytes == all);
    CHECK(stage(all - 1, true, &staged) == COUNT - 1);
}

TEST(small_items_come_first)
{
    mls_staged staged;
    CHECK(stage(0, true, &staged) == 1 && staged.bytes == 0); /* the empty one */
    CHECK(stage(28, true, &staged) == 2 && staged.bytes == 28);
    CHECK(stage(28 + 3996, true, &staged) == 3 && staged.bytes == 28 + 3996);
    CHECK(stage(28 + 3996 + 3999, true, &staged) == 3);
    CHECK(stage(28 + 3996 + 4000, true, &staged) == 4);
}

/* The items left out are as small as possible, because the owner waits until they are
 * written. */
TEST(staging_nearly_fills_the_budget)
{
    size_t all = 0;
    mls_staged staged;
    for (size_t i = 0; i < COUNT; i++) {
        all += 4 * sizes[i];
    }
    CHECK(stage(all - 29, true, &staged) == COUNT - 1 && staged.bytes == all - 3996);
    CHECK(stage(all - 3997, true, &staged) == COUNT - 1 && staged.bytes == all - 4000);
    /* two items that just suffice, rather than one a hundred times as large */
    CHECK(stage(all - 4001, true, &staged) == COUNT - 2);
    CHECK(staged.bytes == all - 4000 - 28);
    CHECK(stage(all - 8025, true, &staged) == COUNT - 1);
    CHECK(staged.bytes == all - 4 * sizes[5]);
}

/* Each thread has a buffer; compressed shards are held whole. */
TEST(staging_overhead_counts_thread_buffers)
{
    size_t none = 0, one_thread = 0, two_threads = 0, coded = 0;
    CHECK(mls_staging_overhead(s.items, 0, 1, false, &none, &status) == MLS_OK);
    CHECK(mls_staging_overhead(s.items, COUNT, 1, false, &one_thread, &status) == MLS_OK);
    CHECK(mls_staging_overhead(s.items, COUNT, 2, false, &two_threads, &status) ==
          MLS_OK);
    CHECK(mls_staging_overhead(s.items, COUNT, 2, true, &coded, &status) == MLS_OK);
    CHECK(none > MLS_WRITE_BUFFER && one_thread > none && one_thread < none + MIB);
    CHECK(two_threads - one_thread >= MLS_WRITE_BUFFER &&
          two_threads - one_thread < MLS_WRITE_BUFFER + MIB);
    CHECK(coded - two_threads >= 2 * (3 * (5 * MIB / 4)) &&
          coded - two_threads < 2 * 8 * MIB);
    s.items[0].part = 4;
    CHECK(mls_staging_overhead(s.items, COUNT, 2, true, &coded, &status) == MLS_E_VALUE);
    CHECK(strcmp(status.name, "large") == 0);
}

/* Items that the caller has copied are not copied again. */
TEST(staged_items_are_not_copied_again)
{
    mls_staged staged;
    unsigned char memory[64];
    for (size_t i = 0; i < COUNT; i++) {
        s.items[i].staged = i != 2;
    }
    const mls_staging to = {.memory = memory, .bytes = sizeof memory, .kernels = kernels};
    CHECK(mls_stage(&to, s.items, COUNT, &staged, &status) == MLS_OK);
    CHECK(staged.bytes == 28 && staged.lent == 0 && s.items[2].data == memory);
    CHECK(s.items[0].data == s.data[0] && s.items[5].strided == &s.strided);
}

/* The size of the part counts, not the size of the tensor. */
TEST(caller_copies_are_recognized_by_address)
{
    unsigned char memory[64] = {0}, other[8] = {0};
    const mls_tensor view = {.data = memory + 9};
    mls_shard_item items[] = {{.data = memory},
                              {.data = other, .staged = true},
                              {.strided = &view},
                              {.data = memory + 10}};
    mls_staging_note(items, 4, memory, 10);
    CHECK(items[0].staged && !items[1].staged && items[2].staged && !items[3].staged);
}

TEST(staging_need_counts_the_part_and_names_a_bad_item)
{
    size_t bytes = 1;
    s.items[3] = part_of(s.items[3], 0, 4, 3);
    CHECK(mls_staging_need(s.items + 2, 2, &bytes, &status) == MLS_OK);
    CHECK(bytes == 28 + 1000);
    CHECK(mls_staging_need(s.items, 0, &bytes, &status) == MLS_OK && bytes == 0);
    s.items[3].part = 4;
    bytes = 17;
    CHECK(mls_staging_need(s.items, COUNT, &bytes, &status) == MLS_E_VALUE &&
          bytes == 17);
    CHECK(strcmp(status.name, "b") == 0);
    mls_staged staged;
    const mls_staging to = {.memory = s.data[0], .bytes = 9, .kernels = kernels};
    CHECK(mls_stage(&to, s.items, COUNT, &staged, &status) == MLS_E_VALUE);
    CHECK(!s.items[2].staged && !s.items[1].staged);
    const size_t huge[] = {SIZE_MAX / 4};
    s.items[0] = item_of("x", NULL, MLS_F64, 1, huge, s.data[0]);
    CHECK_FAILS(mls_staging_need(s.items, 1, &bytes, &status), MLS_E_SIZE,
                "the shard has more bytes than can be stored");
    s.items[0].dtype = s.items[1].dtype = MLS_U8;
    s.items[1].shape = s.items[0].shape;
    s.items[2] = s.items[3] = s.items[4] = s.items[0];
    CHECK(mls_staging_need(s.items, 5, &bytes, &status) == MLS_E_SIZE && bytes == 17);
}

TEST(touching_clears_only_the_given_range)
{
    const size_t bytes = 5 * MIB + 3;
    unsigned char *memory = noise(bytes);
    memory[bytes] = 1;
    const mls_staging all = {.memory = memory, .bytes = bytes, .pool = four_threads};
    mls_staging_touch(&all);
    bool zero = true;
    for (size_t i = 0; i < bytes; i++) {
        zero = zero && memory[i] == 0;
    }
    CHECK(zero && memory[bytes] == 1);
    free(memory);
}

/* ---- the owner is notified when its memory is no longer read ---- */

/* Change the memory as soon as its owner is notified. */
static void spoil(void *calls)
{
    ++*(int *)calls;
    for (size_t i = 0; i < COUNT; i++) {
        memset(s.data[i], 0xEE, 2 * s.bytes[i]);
    }
}

/* Write with a budget while the arrays are overwritten at the first moment allowed: the
 * checksums in the index match the old bytes. */
static void write_with(size_t budget, uint64_t pack_below, const char *generation)
{
    mls_status st;
    mls_staged staged;
    mls_shards_written written, expected;
    renew_state();
    mls_shard_job job = job_of(s.items, COUNT, "a123456789abcdef", NULL);
    job.pack_below = pack_below;
    mls_index good = write_all(&job, &expected);
    unsigned char *memory = malloc(budget + 1);
    const mls_staging to = {
        .memory = memory, .bytes = budget, .kernels = kernels, .pool = four_threads};
    CHECK(mls_stage(&to, s.items, COUNT, &staged, &st) == MLS_OK);
    int calls = 0;
    job.generation = generation;
    job.freed = spoil;
    job.freed_context = &calls;
    mls_index index = write_all(&job, &written);
    CHECK(calls == 1 && index.shard_count == COUNT);
    for (size_t i = 0; i < index.shard_count && i < good.shard_count; i++) {
        CHECK(index.shards[i].crc == good.shards[i].crc);
    }
    mls_index_fini(&index);
    mls_index_fini(&good);
    free(memory);
    empty_pool();
}

TEST(owner_is_notified_when_arrays_are_no_longer_read)
{
    write_with(0, 256 << 10, generations[0]);
    write_with(6000, 256 << 10, generations[1]); /* one segment of both kinds */
    write_with(6000, 0, generations[2]);
    write_with(8 * MIB, 0, generations[3]);
}

/* A write that fails before that moment does not notify the owner. */
TEST(failed_write_does_not_notify_the_owner)
{
    mls_shards_written written;
    int calls = 0;
    watcher w = {0};
    atomic_store(&w.allowed, 1);
    const mls_progress progress = {.report = watch, .context = &w};
    mls_shard_job job = job_of(s.items, COUNT, generations[0], NULL);
    job.progress = &progress;
    job.freed = spoil;
    job.freed_context = &calls;
    CHECK(mls_shards_write(&job, &written, &status) == MLS_E_STOPPED && calls == 0);
    CHECK(pool_files() == 0);
}
