/* Selected parts, the reads they need, and their destinations, with files written by the
 * test. */
#include "checkpoint/ranks/load_plan.h"
#include "support/shards.h"
#include "support/tensors.h"

enum { ROWS = 8, COLUMNS = 6, LARGE = 1 << 20 };

static const size_t matrix[] = {ROWS, COLUMNS}, large[] = {LARGE};

/* A checkpoint of one rank, and a plan over it. */
typedef struct fixture {
    unsigned char *data;
    mls_index index;
    mls_merged_index merged;
    mls_load_plan plan;
} fixture;

static fixture f; /* of the current test */

static void drop(void)
{
    mls_load_plan_fini(&f.plan);
    mls_merged_index_fini(&f.merged);
    mls_index_fini(&f.index);
    free(f.data);
    empty_pool();
}

AFTER_EACH
{
    drop();
}

/* "rows", divided by one layout, both parts; "twice", divided by two; "whole", undivided;
 * "w.m", whose axes are those of "w" transposed. */
BEFORE_EACH
{
    static const signed char turned[] = {1, 0};
    mls_shards_written written;
    f = (fixture){.data = noise(ROWS * COLUMNS)};
    const mls_shard_item whole = item_of("whole", NULL, MLS_U8, 2, matrix, f.data);
    const mls_shard_item rows = item_of("rows", NULL, MLS_U8, 2, matrix, f.data);
    mls_shard_item items[5] = {whole, part_of(rows, 0, 2, 0), part_of(rows, 0, 2, 1),
                               item_of("twice", NULL, MLS_U8, 2, matrix, f.data),
                               item_of("w", "m", MLS_U8, 2, matrix, f.data)};
    items[2].data = f.data + ROWS / 2 * COLUMNS;
    items[3].layout = cut_twice(0, 2, 1, 2);
    items[4].axes = turned;
    const mls_shard_job job = job_of(items, 5, generations[0], NULL);
    f.index = write_all(&job, &written);
    const mls_index *index = &f.index, *disagreeing;
    REQUIRE(mls_merged_index_init(&f.merged, &index, 1, &disagreeing, &status) == MLS_OK);
    REQUIRE(mls_load_plan_init(&f.plan, &f.merged, 8, &status) == MLS_OK);
}

/* Add a tensor of the fixture, "w.m" as the state of a parameter. */
static mls_load_item *add(const char *key)
{
    const mls_section section = strcmp(key, "w.m") == 0 ? MLS_OPTIM_STATE : MLS_PARAMS;
    const mls_tensor_id id = mls_tensor_id_of(section, text(key));
    return mls_load_plan_add(&f.plan, &id);
}

/* Add all of a tensor. */
static mls_load_item *add_full(const char *key)
{
    const mls_cutting none = {0};
    mls_load_item *w = add(key);
    CHECK(w != NULL && mls_load_item_select(w, &none, &status) == MLS_OK);
    return w;
}

TEST(tensors_are_looked_up_in_any_order)
{
    static const char *const keys[] = {"rows", "twice", "whole", "w.m", "rows", "whole"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const mls_load_item *w = add(keys[i]);
        REQUIRE(w != NULL && w == &f.plan.items[i]);
        CHECK(mls_str_is(w->tensor->any_shard->id.name, i == 3 ? "w" : keys[i]));
    }
    CHECK(add("w") == NULL && add("") == NULL && f.plan.count == 6);
}

TEST(requested_part_is_selected)
{
    const mls_cutting none = {0}, third = {.index = 2, .world = 4};
    const mls_cutting layout = {.has_layout = true, .layout = cut(0, 4), .index = 1};
    mls_load_item *rows = add("rows"), *twice = add("twice");
    mls_load_item *full = add("whole"), *state = add("w.m");
    REQUIRE(rows != NULL && twice != NULL && full != NULL && state != NULL);
    CHECK(mls_load_item_select(rows, &none, &status) == MLS_OK);
    CHECK(rows->part.length[0] == ROWS && mls_load_item_bytes(rows) == ROWS * COLUMNS);
    /* the stored layout, for another world */
    CHECK(mls_load_item_select(rows, &third, &status) == MLS_OK);
    CHECK(rows->part.start[0] == 4 && rows->part.length[0] == 2);
    CHECK(mls_load_item_select(full, &third, &status) == MLS_OK &&
          full->part.length[0] == ROWS);
    /* by a layout of the parameter: the first axis of "w" is the second one of its
     * state */
    CHECK(mls_load_item_select(twice, &layout, &status) == MLS_OK &&
          twice->part.length[0] == 2);
    CHECK(mls_load_item_select(state, &layout, &status) == MLS_OK);
    CHECK(state->part.length[0] == ROWS && state->part.length[1] == 2);
    CHECK(mls_load_item_select(twice, &third, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.text, "its layout has 2 steps: give a layout of 4 parts");
    CHECK_TEXT(status.name, "twice");
}

TEST(element_range_of_the_full_tensor_is_a_part)
{
    mls_load_item *w = add("whole");
    REQUIRE(w != NULL);
    CHECK(mls_load_item_run(w, 5, 17, &status) == MLS_OK && mls_load_item_bytes(w) == 12);
    CHECK(mls_load_item_run(w, 48, 48, &status) == MLS_OK && mls_load_item_bytes(w) == 0);
    CHECK(mls_load_item_run(w, -1, 3, &status) == MLS_E_VALUE);
    CHECK(mls_load_item_run(w, 4, 3, &status) == MLS_E_VALUE);
    CHECK(mls_load_item_run(w, 0, 49, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.text, "elements 0 to 49 do not exist: the tensor has 48");
}

TEST(different_full_shape_is_refused)
{
    const size_t other[] = {ROWS + 1, COLUMNS};
    const mls_load_item *w = add("whole");
    REQUIRE(w != NULL);
    CHECK(mls_load_item_check_full(w, 2, matrix, &status) == MLS_OK);
    CHECK_FAILS(mls_load_item_check_full(w, 1, matrix, &status), MLS_E_SHAPE,
                "the checkpoint has shape (8, 6), the target (8,)");
    CHECK(mls_load_item_check_full(w, 2, other, &status) == MLS_E_SHAPE);
    CHECK_TEXT(status.expected, "(9, 6)");
    CHECK_TEXT(status.got, "(8, 6)");
    CHECK_TEXT(status.name, "whole");
}

/* Read into packed memory and into every other byte of `strided`. */
TEST(parts_are_read_to_their_targets)
{
    unsigned char packed[ROWS * COLUMNS], strided[2 * ROWS * COLUMNS];
    const char *file;
    size_t failed;
    mls_tensor view = tensor_of(packed, MLS_U8, 2, matrix);
    mls_load_target targets[2];
    const mls_load_item *rows = add_full("rows"), *full = add_full("whole");
    REQUIRE(rows != NULL && full != NULL);
    REQUIRE(mls_load_target_init(&targets[0], &view, &status) == MLS_OK);
    CHECK(targets[0].data == packed && targets[0].strided == NULL);
    view.data = strided;
    view.strides[1] = 2;
    view.strides[0] = 2 * COLUMNS;
    memset(strided, 7, sizeof strided);
    REQUIRE(mls_load_target_init(&targets[1], &view, &status) == MLS_OK);
    CHECK(targets[1].data == NULL && targets[1].strided != NULL);
    REQUIRE(mls_load_plan_find(&f.plan, pool_fd, &file, &status) == MLS_OK);
    CHECK(f.plan.piece_count == 3 && rows->count == 2 && full->first == 2);
    REQUIRE(mls_load_plan_place_all(&f.plan, targets, &status) == MLS_OK);
    const mls_read_request request = {.folder = pool_fd,
                                      .pieces = f.plan.pieces,
                                      .count = f.plan.piece_count,
                                      .crc = crc,
                                      .pool = four_threads};
    REQUIRE(mls_shards_read(&request, &failed, &status) == MLS_OK);
    mls_load_plan_scatter(&f.plan, targets, kernels);
    CHECK(memcmp(packed, f.data, sizeof packed) == 0);
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        CHECK(strided[2 * i] == f.data[i] && strided[2 * i + 1] == 7);
    }
    mls_load_target_fini(&targets[0]);
    mls_load_target_fini(&targets[1]);
}

/* Mapped parts are not read: their read ranges are removed. */
TEST(kept_pieces_are_compacted)
{
    unsigned char memory;
    size_t used = 0;
    const char *file;
    static const char *const keys[] = {"rows", "twice", "whole"};
    for (size_t i = 0; i < 3; i++) {
        REQUIRE(add_full(keys[i]) != NULL);
    }
    /* one of the four parts of "twice" is stored, so the tensor is incomplete */
    CHECK_FAILS(mls_load_plan_find(&f.plan, pool_fd, &file, &status), MLS_E_FORMAT,
                "the tensor is incomplete: 1 of its 4 parts are stored, with 12 of the "
                "48 requested elements");
    CHECK_TEXT(status.name, "twice");
    mls_load_plan_fini(&f.plan);
    REQUIRE(mls_load_plan_init(&f.plan, &f.merged, 8, &status) == MLS_OK);
    for (size_t i = 0; i < 3; i += 2) {
        REQUIRE(add_full(keys[i]) != NULL);
    }
    REQUIRE(mls_load_plan_find(&f.plan, pool_fd, &file, &status) == MLS_OK);
    const mls_stored_shard *last = f.plan.pieces[2].shard;
    mls_load_plan_place(&f.plan, 1, &memory, true);
    mls_load_plan_keep(&f.plan, 1, &used);
    CHECK(used == 1 && f.plan.pieces[0].shard == last);
    CHECK(f.plan.pieces[0].data == &memory);
}

TEST(wrong_file_length_is_refused_before_allocation)
{
    const mls_cutting none = {0};
    const char *file;
    mls_load_item *w = add("whole");
    REQUIRE(w != NULL && mls_load_item_select(w, &none, &status) == MLS_OK);
    const char *path = f.index.files[f.merged.tensors[f.plan.last].any_shard->file].path;
    REQUIRE(set_length(path, 3));
    CHECK_FAILS(mls_load_plan_find(&f.plan, pool_fd, &file, &status), MLS_E_FORMAT,
                "the file is 3 bytes long, and not 4180");
    REQUIRE(file != NULL);
    CHECK_TEXT(file, path);
}

/* A megabyte of zeros with one nonzero byte: in zeroed memory, zeros are not written and
 * their pages stay untouched. */
TEST(long_zero_runs_are_not_written)
{
    const char *file;
    mls_shards_written written;
    drop();
    f = (fixture){.data = calloc(LARGE, 1)};
    REQUIRE(f.data != NULL);
    f.data[5] = 1;
    const mls_shard_item item = item_of("zeros", NULL, MLS_U8, 1, large, f.data);
    mls_shard_job job = job_of(&item, 1, generations[0], NULL);
    job.sparse = true;
    f.index = write_all(&job, &written);
    const mls_index *index = &f.index, *disagreeing;
    REQUIRE(mls_merged_index_init(&f.merged, &index, 1, &disagreeing, &status) == MLS_OK);
    REQUIRE(mls_load_plan_init(&f.plan, &f.merged, 1, &status) == MLS_OK);
    const mls_load_item *w = add_full("zeros");
    REQUIRE(w != NULL);
    REQUIRE(mls_load_plan_find(&f.plan, pool_fd, &file, &status) == MLS_OK);
    CHECK(w->long_zeros && w->count == 2);
    mls_load_plan_foresee(&f.plan);
    for (size_t i = 0; i < w->count; i++) {
        CHECK((f.plan.pieces[i].data == NULL) == (f.plan.stored[i].file == NULL));
    }
    mls_load_plan_place(&f.plan, 0, f.data, false); /* memory with other content */
    CHECK(f.plan.pieces[0].data == f.data && f.plan.pieces[1].data == f.data);
}
