/* Which shards are written, into which files, and which stay in their files. */
#include "checkpoint/write/write_plan.h"
#include "io/safe_filename.h"
#include "support/shards.h"

enum { MIB = 1 << 20 };

static const size_t five[] = {5}, matrix[] = {6, 4}, square[] = {4, 4};

/* A complete plan with all files laid out; `same` marks unchanged shards, as the
 * comparison would.  NULL: none. */
static mls_write_plan place(const mls_shard_job *job, const bool *same)
{
    mls_write_plan plan = {0};
    mls_status st;
    mls_code code = mls_write_plan_init(&plan, job, &st);
    for (size_t i = 0; code == MLS_OK && same != NULL && i < job->count; i++) {
        plan.planned[i].is_unchanged = same[i];
    }
    if (code == MLS_OK && (code = mls_write_plan_reuse(&plan, &st)) == MLS_OK) {
        code = mls_write_plan_assign_files(&plan, &st);
    }
    for (size_t i = 0; code == MLS_OK && i < plan.file_count; i++) {
        code = mls_write_plan_lay_out(&plan, &plan.files[i], &st);
    }
    if (code != MLS_OK) {
        printf("    %s\n", st.text);
    }
    CHECK(code == MLS_OK);
    return plan;
}

/* The path of the file for shard `i`. */
static const char *path_of(const mls_write_plan *plan, size_t i)
{
    return plan->index.files[plan->index.shards[i].file].path;
}

/* ---- of the current test ---- */

static mls_write_plan plan, first, second;

AFTER_EACH
{
    mls_write_plan_fini(&second);
    mls_write_plan_fini(&first);
    mls_write_plan_fini(&plan);
}

/* ---- order ---- */

TEST(items_come_in_the_order_of_an_index)
{
    static const char *const keys[] = {"B", "a", "a", "a.b", "a.m", "a.v", "a.b.m"};
    mls_shard_item items[7];
    items[0] = item_of("a.b", "m", MLS_F32, 1, five, NULL);
    items[1] = item_of("a", "v", MLS_F32, 1, five, NULL);
    items[2] = item_of("a.b", NULL, MLS_F32, 1, five, NULL);
    items[3] = part_of(item_of("a", NULL, MLS_F32, 1, five, NULL), 0, 2, 1);
    items[4] = item_of("a", "m", MLS_F32, 1, five, NULL);
    items[5] = part_of(item_of("a", NULL, MLS_F32, 1, five, NULL), 0, 2, 0);
    items[6] = item_of("B", NULL, MLS_F32, 1, five, NULL);
    const mls_shard_job job = job_of(items, 7, generations[0], NULL);
    REQUIRE(mls_write_plan_init(&plan, &job, &status) == MLS_OK);
    CHECK(plan.index.shard_count == 7 && plan.index.world_size == 1);
    CHECK_TEXT(plan.index.generation, generations[0]);
    for (size_t i = 0; i < 7; i++) {
        CHECK(mls_str_is(plan.planned[i].key, keys[i]));
        CHECK(i == 0 ||
              mls_index_compare(&plan.index.shards[i - 1], &plan.index.shards[i]) < 0);
    }
    CHECK(plan.planned[1].item == &items[5] && plan.planned[2].item == &items[3]);
    mls_write_plan_fini(&plan);
    CHECK(plan.planned == NULL && plan.files == NULL && plan.index.shards == NULL);
}

TEST(file_stores_the_shape_of_each_part)
{
    const mls_shard_item full_item = item_of("w", NULL, MLS_F32, 2, matrix, NULL);
    mls_shard_item items[5] = {
        part_of(full_item, 0, 4, 0), part_of(full_item, 0, 4, 2),
        part_of(full_item, 0, 4, 3), item_of("x", NULL, MLS_F64, 0, NULL, NULL),
        part_of(item_of("y", NULL, MLS_F32, 2, matrix, NULL), MLS_LAYOUT_FLAT, 5, 4)};
    static const int ranks[] = {2, 2, 2, 0, 1};
    static const size_t firsts[] = {2, 2, 0, 0, 4}, bytes[] = {32, 32, 0, 8, 16};
    const mls_shard_job job = job_of(items, 5, generations[0], NULL);
    REQUIRE(mls_write_plan_init(&plan, &job, &status) == MLS_OK);
    for (size_t i = 0; i < 5; i++) {
        CHECK(plan.planned[i].rank == ranks[i] && plan.index.shards[i].bytes == bytes[i]);
        CHECK(ranks[i] == 0 || plan.planned[i].shape[0] == firsts[i]);
    }
    CHECK(plan.index.shards[4].shape == matrix); /* of the whole tensor */
}

/* A plan fails with this text; the error names the tensor. */
static void check_refused(const mls_shard_item *items, size_t count, const char *name,
                          mls_code code, const char *text)
{
    const mls_shard_job job = job_of(items, count, generations[0], NULL);
    CHECK_FAILS(mls_write_plan_init(&plan, &job, &status), code, text);
    CHECK(plan.planned == NULL && plan.index.shards == NULL);
    CHECK_TEXT(status.name, name);
}

TEST(duplicate_parts_are_refused)
{
    mls_shard_item items[3] = {
        part_of(item_of("w", NULL, MLS_F32, 1, five, NULL), 0, 2, 1),
        item_of("v", NULL, MLS_F32, 1, five, NULL),
        part_of(item_of("w", NULL, MLS_F32, 1, five, NULL), 0, 2, 1)};
    check_refused(items, 3, "w", MLS_E_VALUE, "part 1 of one tensor appears twice");
    items[2].id.section = MLS_OPTIM_STATE; /* another item of that name */
    const mls_shard_job job = job_of(items, 3, generations[0], NULL);
    CHECK(mls_write_plan_init(&plan, &job, &status) == MLS_OK);
}

TEST(names_that_an_index_cannot_hold_are_refused)
{
    mls_shard_item item = item_of("a\xFF", NULL, MLS_F32, 1, five, NULL);
    check_refused(&item, 1, "a", MLS_E_VALUE, "a name is not valid UTF-8");
    item = item_of("w", "\xFF", MLS_F32, 1, five, NULL);
    check_refused(&item, 1, "w", MLS_E_VALUE, "a name is not valid UTF-8");
    item = item_of("w", "m.x", MLS_F32, 1, five, NULL);
    check_refused(&item, 1, "w", MLS_E_VALUE, "the name of a state has a dot");
    item = item_of("group.lr", "", MLS_F32, 1, five, NULL);
    item.id.has_state = false; /* could be mistaken for state "lr" of "group" */
    check_refused(&item, 1, "group.lr", MLS_E_VALUE, "the name of a state has a dot");
    item = item_of("__metadata__", NULL, MLS_U8, 1, five, NULL);
    check_refused(&item, 1, "__metadata__", MLS_E_VALUE,
                  "the name '__metadata__' is reserved by the format");
}

TEST(impossible_tensors_are_refused)
{
    const size_t huge[] = {SIZE_MAX / 2, 3}, many[17] = {0};
    const mls_shard_item good = item_of("w", NULL, MLS_F32, 2, matrix, NULL);
    mls_shard_item item = part_of(good, 2, 2, 0);
    check_refused(&item, 1, "w", MLS_E_SHAPE, "the layout cuts axis 2 of 2 dimensions");
    item = part_of(good, 0, 1000000001, 0); /* its number would not fit a file name */
    check_refused(&item, 1, "w", MLS_E_SIZE,
                  "the tensor has more parts or bytes than can be stored");
    item = item_of("w", NULL, MLS_F32, 2, huge, NULL);
    check_refused(&item, 1, "w", MLS_E_SIZE,
                  "the tensor has more elements than can be counted");
    item = item_of("w", NULL, MLS_F32, 17, many, NULL);
    check_refused(&item, 1, "w", MLS_E_SHAPE, "17 dimensions: at most 16 can be stored");
    item = item_of("w", NULL, MLS_F32, -1, many, NULL);
    check_refused(&item, 1, "w", MLS_E_SHAPE, "-1 dimensions: at most 16 can be stored");
}

TEST(empty_list_gives_an_empty_plan)
{
    const mls_shard_job job = job_of(NULL, 0, generations[0], NULL);
    plan = place(&job, NULL);
    CHECK(plan.index.shard_count == 0 && plan.file_count == 0);
    CHECK(plan.index.file_count == 0);
    mls_write_plan_fini(&plan);
    mls_write_plan_fini(&plan); /* zeroed */
}

TEST(differing_state_axes_are_recorded)
{
    const size_t rows[] = {6}, fours[] = {4}, narrow[] = {6, 1};
    mls_shard_item items[] = {item_of("a", NULL, MLS_F32, 2, square, NULL),
                              item_of("a", "col", MLS_F32, 1, fours, NULL),
                              item_of("a", "row", MLS_F32, 1, fours, NULL),
                              item_of("b", NULL, MLS_F32, 2, matrix, NULL),
                              item_of("b", "m", MLS_F32, 2, matrix, NULL),
                              item_of("b", "narrow", MLS_F32, 2, narrow, NULL),
                              item_of("b", "r", MLS_F32, 1, rows, NULL),
                              item_of("b", "step", MLS_F32, 0, NULL, NULL),
                              item_of("c", "row", MLS_F32, 1, rows, NULL),
                              item_of("lr", "", MLS_F32, 1, rows, NULL)};
    items[9].id.has_state = false;
    const signed char axes[] = {1};
    mls_shard_item elsewhere = item_of("d", "col", MLS_F32, 1, fours, NULL);
    elsewhere.axes = axes; /* another rank stores its parameter */
    items[8] = elsewhere;
    const mls_shard_job job = job_of(items, 10, generations[0], NULL);
    plan = place(&job, NULL);
    const mls_index_shard *shards = plan.index.shards; /* params a and b come first */
    CHECK(shards[0].axes == NULL && shards[1].axes == NULL);
    REQUIRE(shards[2].axes && shards[3].axes && shards[5].axes && shards[6].axes);
    CHECK(shards[2].axes[0] == 1 && shards[3].axes[0] == 0);
    CHECK(shards[4].axes == NULL && shards[7].axes == NULL);
    CHECK(shards[5].axes[0] == 0 && shards[5].axes[1] == MLS_NO_AXIS);
    CHECK(shards[6].axes[0] == 0);
    CHECK(shards[8].axes == axes && shards[9].axes == NULL);
}

/* ---- files ---- */

TEST(small_shards_share_a_file_of_their_section)
{
    mls_shard_item items[5] = {item_of("a", NULL, MLS_F32, 1, five, NULL),
                               item_of("b", NULL, MLS_U8, 1, five, NULL),
                               item_of("a", "m", MLS_F32, 1, five, NULL),
                               item_of("b", "m", MLS_F32, 1, five, NULL),
                               item_of("c", NULL, MLS_F64, 1, five, NULL)};
    mls_shard_job job = job_of(items, 5, generations[0], NULL);
    job.rank = 7;
    job.world_size = 8;
    plan = place(&job, NULL);
    REQUIRE(plan.file_count == 2 && plan.index.file_count == 2);
    for (size_t i = 0; i < 5; i++) {
        CHECK_TEXT(path_of(&plan, i),
                   i < 3 ? "params/segment-0.0123456789abcdef-7.safetensors"
                         : "optim_state/segment-1.0123456789abcdef-7.safetensors");
    }
    CHECK(plan.index.shards[2].offset == 4096); /* the largest items first */
    CHECK(plan.index.shards[0].offset == 4096 + 40);
    CHECK(plan.index.shards[1].offset == 4096 + 60);
    CHECK(plan.index.files[0].bytes == 4096 + 65);
    CHECK(plan.files[0].header.tensors[0].number == 2);
}

TEST(large_shards_get_separate_files)
{
    const size_t at[] = {1000}, below[] = {999};
    mls_shard_item items[] = {
        item_of("at", NULL, MLS_U8, 1, at, NULL),
        item_of("below", NULL, MLS_U8, 1, below, NULL),
        item_of("below.too", NULL, MLS_U8, 1, below, NULL),
        part_of(item_of("part", NULL, MLS_F64, 1, at, NULL), 0, 3, 1)};
    mls_shard_job job = job_of(items, 4, generations[1], NULL);
    job.pack_below = 1000;
    plan = place(&job, NULL);
    CHECK(plan.file_count == 3);
    CHECK_TEXT(path_of(&plan, 0), "params/at.0-1.1123456789abcdef-0.safetensors");
    CHECK_TEXT(path_of(&plan, 1), "params/segment-0.1123456789abcdef-0.safetensors");
    CHECK_TEXT(path_of(&plan, 2), path_of(&plan, 1));
    CHECK_TEXT(path_of(&plan, 3), "params/part.1-3.1123456789abcdef-0.safetensors");
    mls_write_plan_fini(&plan);
    job.pack_below = 0; /* no shard is small, not even an empty one */
    plan = place(&job, NULL);
    CHECK(plan.file_count == 4);
}

/* Bytes of all shards in file `file`. */
static uint64_t payload(size_t file)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < plan.index.shard_count; i++) {
        bytes += plan.index.shards[i].file == file ? plan.index.shards[i].bytes : 0;
    }
    return bytes;
}

TEST(a_segment_holds_no_more_than_32_mebibytes)
{
    enum { COUNT = 20 };
    static const size_t sizes[] = {4 * MIB, 5 * MIB, 32 * MIB, 33 * MIB, 3 * MIB + 77};
    static const size_t files[] = {3, 4, 20, 20, 2};
    static const uint64_t firsts[] = {32 * MIB, 30 * MIB, 32 * MIB, 33 * MIB,
                                      10 * (3 * MIB + 77)};
    for (size_t i = 0; i < 5; i++) {
        char names[COUNT][4];
        mls_shard_item items[COUNT];
        for (size_t j = 0; j < COUNT; j++) {
            snprintf(names[j], sizeof names[j], "%02zu", j);
            items[j] = item_of(names[j], NULL, MLS_U8, 1, &sizes[i], NULL);
        }
        mls_shard_job job = job_of(items, COUNT, generations[0], NULL);
        job.pack_below = UINT64_MAX;
        plan = place(&job, NULL);
        CHECK(plan.file_count == files[i] && payload(0) == firsts[i]);
        mls_write_plan_fini(&plan);
    }
}

TEST(two_parts_of_one_tensor_never_share_a_file)
{
    mls_shard_item items[6];
    for (size_t i = 0; i < 3; i++) {
        items[i] = part_of(item_of("a", NULL, MLS_U8, 1, five, NULL), 0, 3, i);
    }
    for (size_t i = 0; i < 2; i++) {
        items[3 + i] = part_of(item_of("b", NULL, MLS_U8, 1, five, NULL), 0, 3, 2 * i);
    }
    items[5] = item_of("c", NULL, MLS_U8, 1, five, NULL);
    const mls_shard_job job = job_of(items, 6, generations[0], NULL);
    plan = place(&job, NULL);
    static const size_t files[] = {0, 1, 2, 0, 1, 0};
    CHECK(plan.file_count == 3);
    for (size_t i = 0; i < 6; i++) {
        CHECK(plan.index.shards[i].file == files[i]);
    }
}

TEST(file_names_are_portable)
{
    mls_shard_item items[] = {item_of("", NULL, MLS_U8, 1, five, NULL),
                              item_of("A/b", NULL, MLS_U8, 1, five, NULL),
                              item_of("a/b", NULL, MLS_U8, 1, five, NULL),
                              item_of("con", "M", MLS_U8, 1, five, NULL)};
    mls_shard_job job = job_of(items, 4, generations[0], NULL);
    job.pack_below = 0;
    plan = place(&job, NULL);
    CHECK_TEXT(path_of(&plan, 0), "params/=.0-1.0123456789abcdef-0.safetensors");
    CHECK_TEXT(path_of(&plan, 1), "params/=41=2fb.0-1.0123456789abcdef-0.safetensors");
    CHECK_TEXT(path_of(&plan, 2), "params/a=2fb.0-1.0123456789abcdef-0.safetensors");
    CHECK_TEXT(path_of(&plan, 3),
               "optim_state/=63on.=4d.0-1.0123456789abcdef-0.safetensors");
}

TEST(cut_names_stay_apart_and_fit_an_index)
{
    enum { COUNT = 30, LENGTH = 400 };
    static char names[COUNT][LENGTH + 1];
    const size_t parts = 1000000000;
    mls_shard_item items[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        memset(names[i], 'Q', LENGTH);
        snprintf(names[i] + LENGTH - 2, 3, "%02zu", i);
        items[i] = part_of(item_of(names[i], "state", MLS_U8, 1, five, NULL), 0, parts,
                           parts - 1);
    }
    mls_shard_job job = job_of(items, COUNT, generations[0], NULL);
    job.pack_below = 0;
    job.world_size = 1 << 24;
    job.rank = job.world_size - 1;
    plan = place(&job, NULL);
    REQUIRE(plan.file_count == COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK(strlen(path_of(&plan, i)) <= MLS_PATH_BYTES);
        for (size_t j = 0; j < i; j++) {
            CHECK(strcmp(path_of(&plan, i), path_of(&plan, j)) != 0);
        }
    }
    memset(names[0], 'q', 158); /* with the state, the most that is not cut */
    items[0].id.name.length = 158;
    items[0].id.state.length = 1;
    job.rank = UINT64_MAX; /* more digits than a rank of any world has */
    REQUIRE(mls_write_plan_init(&second, &job, &status) == MLS_OK &&
            mls_write_plan_reuse(&second, &status) == MLS_OK);
    CHECK_FAILS(mls_write_plan_assign_files(&second, &status), MLS_E_SIZE,
                "the name of a file is too long");
}

/* The plan is an index that the reader accepts, with each shard at the place that its
 * file's header names. */
TEST(planned_index_can_be_read)
{
    enum { COUNT = 40 };
    static char names[COUNT][8];
    mls_shard_item items[COUNT];
    size_t shapes[COUNT][2];
    for (size_t i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "%zu.w", i % 20);
        shapes[i][0] = i % 7;
        shapes[i][1] = 100 * (i % 5);
        items[i] = item_of(names[i], i < 20 ? NULL : "m", i % 3 ? MLS_BF16 : MLS_F64, 2,
                           shapes[i], NULL);
    }
    mls_shard_job job = job_of(items, COUNT, generations[0], NULL);
    job.pack_below = 3000;
    plan = place(&job, NULL);
    mls_json_writer built = {0};
    mls_index read = {0};
    uint32_t sum;
    CHECK(mls_index_build(&plan.index, crc, &built, &sum, &status) == MLS_OK);
    REQUIRE(mls_index_parse(built.data, built.length, crc, &read, &status) == MLS_OK);
    CHECK(read.shard_count == COUNT && read.file_count == plan.file_count);
    for (size_t i = 0; i < plan.file_count; i++) {
        const mls_header *h = &plan.files[i].header;
        CHECK(h->text.length % 4096 == 0);
        CHECK(h->file_bytes == read.files[plan.files[i].file].bytes);
        for (size_t j = 0; j < h->count; j++) {
            const mls_index_shard *shard = &read.shards[h->tensors[j].number];
            CHECK(shard->file == plan.files[i].file);
            CHECK(shard->offset == h->tensors[j].offset);
            CHECK(shard->bytes == h->tensors[j].bytes && shard->version == 1);
        }
    }
    mls_index_fini(&read);
    mls_json_writer_fini(&built);
}

/* ---- compared with the committed index ---- */

/* Five parameters that share a segment, and one with its own file. */
static const size_t hundred[] = {100}, large[] = {1000000};

static mls_shard_item six[6];

BEFORE_EACH
{
    static const char *const names[] = {"a", "b", "c", "d", "e", "large"};
    for (size_t i = 0; i < 6; i++) {
        six[i] = item_of(names[i], NULL, MLS_U8, 1, i == 5 ? large : hundred, NULL);
    }
}

/* Set `first` to the plan of the first `count` of them. */
static void commit(size_t count)
{
    const mls_shard_job job = job_of(six, count, generations[0], NULL);
    first = place(&job, NULL);
}

TEST(shard_matches_previous_save_if_layout_is_equal)
{
    mls_shard_item then[6];
    memcpy(then, six, sizeof then);
    six[1] = part_of(six[1], 0, 2, 0);
    then[1] = part_of(then[1], 0, 2, 1); /* another part */
    then[2] = part_of(then[2], 0, 1, 0); /* all of it, but with a layout */
    then[3].dtype = MLS_I8;
    then[4].shape = (const size_t[]){99};
    commit(6);
    const mls_shard_job again = job_of(then, 6, generations[1], &first.index);
    REQUIRE(mls_write_plan_init(&second, &again, &status) == MLS_OK);
    for (size_t i = 0; i < 6; i++) {
        CHECK(second.planned[i].before ==
              (i == 0 || i == 5 ? &first.index.shards[i] : NULL));
    }
}

TEST(added_and_removed_tensors_keep_other_matches)
{
    const mls_shard_job job = job_of(six + 1, 4, generations[0], NULL); /* b .. e */
    first = place(&job, NULL);
    six[2].id.name = text("cc");
    const mls_shard_job again = job_of(six, 6, generations[1], &first.index);
    REQUIRE(mls_write_plan_init(&second, &again, &status) == MLS_OK);
    CHECK(second.planned[0].before == NULL && second.planned[2].before == NULL);
    CHECK(second.planned[1].before == &first.index.shards[0]);
    CHECK(second.planned[3].before == &first.index.shards[2]);
    CHECK(second.planned[4].before == &first.index.shards[3]);
    CHECK(second.planned[5].before == NULL);
}

TEST(unchanged_shards_keep_their_record)
{
    static const bool same[] = {true, false, true, true, false, true};
    commit(6);
    first.index.shards[2].crc = 1234;
    const mls_shard_job again = job_of(six, 6, generations[1], &first.index);
    second = place(&again, same);
    CHECK(second.file_count == 1 && second.index.file_count == 3);
    for (size_t i = 0; i < 6; i++) {
        const mls_index_shard *before = &first.index.shards[i];
        const mls_index_shard *shard = &second.index.shards[i];
        CHECK(second.planned[i].is_reused == same[i]);
        CHECK(shard->version == (same[i] ? 1U : 2U));
        if (same[i]) {
            CHECK_TEXT(path_of(&second, i), path_of(&first, i));
            CHECK(shard->offset == before->offset && shard->crcs == before->crcs);
        } else {
            CHECK_TEXT(path_of(&second, i),
                       "params/segment-0.1123456789abcdef-0.safetensors");
        }
    }
    CHECK(second.index.shards[2].crc == 1234);
    CHECK(second.index.files[0].bytes == first.index.files[0].bytes);
}

TEST(unreferenced_files_are_not_listed)
{
    static const bool same[] = {false, false, false, false, false, true};
    commit(6);
    const mls_shard_job again = job_of(six, 6, generations[1], &first.index);
    second = place(&again, same);
    CHECK(second.index.file_count == 2);
    CHECK_TEXT(second.index.files[0].path, path_of(&first, 5));
}

/* Four equal shards: half in use is enough, a quarter is not. */
TEST(mostly_dead_segment_is_rewritten)
{
    commit(4);
    for (size_t alive = 0; alive <= 4; alive++) {
        bool same[4];
        for (size_t i = 0; i < 4; i++) {
            same[i] = i < alive;
        }
        const mls_shard_job again = job_of(six, 4, generations[1], &first.index);
        second = place(&again, same);
        CHECK(second.file_count == (alive == 4 ? 0U : 1U));
        CHECK(second.index.file_count == (alive == 2 || alive == 3 ? 2U : 1U));
        for (size_t i = 0; i < 4; i++) {
            CHECK(second.planned[i].is_reused == (same[i] && alive >= 2));
            CHECK(second.index.shards[i].version == (same[i] ? 1U : 2U));
        }
        mls_write_plan_fini(&second);
    }
}

/* Deleted shards, which the new items lack, count as dead. */
TEST(deleted_tensors_make_a_segment_dead)
{
    static const bool same[] = {true, true};
    commit(5);
    const mls_shard_job again = job_of(six, 2, generations[1], &first.index);
    second = place(&again, same);
    CHECK(!second.planned[0].is_reused && !second.planned[1].is_reused &&
          second.file_count == 1);
}

TEST(caller_versions_are_stored_unchanged)
{
    six[0].version = 41;
    commit(6);
    CHECK(first.index.shards[0].version == 41 && first.index.shards[1].version == 1);
    six[0].version = 0; /* from now on mlstate counts the version */
    six[1].version = 77;
    const mls_shard_job again = job_of(six, 6, generations[1], &first.index);
    second = place(&again, NULL);
    CHECK(second.index.shards[0].version == 42 && second.index.shards[1].version == 77);
}

/* An index could not store it. */
TEST(maximum_version_is_not_incremented)
{
    mls_shard_item item = item_of("w", NULL, MLS_U8, 1, hundred, NULL);
    item.version = INT64_MAX;
    const mls_shard_job job = job_of(&item, 1, generations[0], NULL);
    first = place(&job, NULL);
    item.version = 0;
    const mls_shard_job again = job_of(&item, 1, generations[1], &first.index);
    REQUIRE(mls_write_plan_init(&second, &again, &status) == MLS_OK);
    CHECK_FAILS(mls_write_plan_assign_files(&second, &status), MLS_E_VALUE,
                "the version of a shard cannot increase: it is already the largest one");
    CHECK_TEXT(status.name, "w");
    mls_write_plan_fini(&second);
    static const bool same[] = {true};
    second = place(&again, same); /* an unchanged shard keeps its version */
    CHECK(second.index.shards[0].version == INT64_MAX);
}
