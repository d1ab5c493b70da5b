/* Every allocation fails once, the n-th one for every n: in reading, writing and parsing
 * files and checkpoints, in making and comparing trees of names, and in counting layers.
 * Each call must return MLS_E_MEMORY with nothing leaked, the outputs unchanged and the
 * old file intact.  Linked with -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc. */
#include "activation/strategy.h"
#include "base/memory.h"
#include "checkpoint/index/index.h"
#include "checkpoint/index/index_of_files.h"
#include "checkpoint/index/shard_header_rebuild.h"
#include "checkpoint/ranks/index_pattern.h"
#include "checkpoint/ranks/load_plan.h"
#include "checkpoint/ranks/merged_index.h"
#include "checkpoint/read/shard_read.h"
#include "checkpoint/read/verify.h"
#include "checkpoint/write/shard_list.h"
#include "checkpoint/write/write_plan.h"
#include "follow/delta.h"
#include "io/file.h"
#include "io/json_checksum.h"
#include "io/json_reader.h"
#include "planning/plan.h"
#include "planning/schedule_search.h"
#include "safetensors/safetensors.h"
#include "state/load_into.h"
#include "state/name_tree.h"
#include "support/chains.h"
#include "support/failing_alloc.h"
#include "support/runner.h"
#include "support/shards.h"
#include "support/temporary_folder.h"
#include "support/tensors.h"

#include <unistd.h>

/* ---- JSON ---- */

static mls_code parse_json(mls_status *st)
{
    /* enough values to grow the nodes, and objects to sort */
    static const char text[] =
        "[{\"a\":1,\"b\":2,\"c\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14]},"
        "{\"a\":1,\"b\":2,\"c\":3,\"d\":4,\"e\":5,\"f\":6,\"g\":7}]";
    mls_json *doc = NULL;
    const mls_json_limits limits = {.depth = 8, .nodes = 100};
    const mls_code code = mls_json_parse(text, sizeof text - 1, limits, &doc, st);
    CHECK((code == MLS_OK) == (doc != NULL));
    mls_json_free(doc);
    return code;
}

TEST(parsing_json_survives_every_failure)
{
    CHECK(fail_each(parse_json) >= 5);
}

/* ---- files ---- */

static void write_old(void)
{
    write_text(file_path, "old");
}

static bool old_is_readable(void)
{
    char seen[8] = "";
    FILE *file = fopen(file_path, "rb");
    const size_t got = file == NULL ? 0 : fread(seen, 1, sizeof seen, file);
    if (file != NULL) {
        fclose(file);
    }
    return got == 3 && memcmp(seen, "old", 3) == 0;
}

static mls_code write_state(mls_status *st)
{
    float floats[6] = {0, 1, 2, 3, 4, 5};
    const mls_tensor packed = matrix_of(floats, MLS_F32, 2, 3);
    const mls_tensor strided = transposed_of(floats, MLS_F32, 3, 2);
    const mls_named_tensor tensors[] = {{text("packed"), &packed}, {text("t"), &strided}};
    const mls_str_pair pair = {text("key"), text("value")};
    const mls_safetensors_content content = {
        .tensors = tensors, .count = 2, .metadata = &pair, .metadata_count = 1};
    const mls_code code = mls_safetensors_write(
        file_path, &content, mls_kernels_of(MLS_CPU_SCALAR), &mls_crc_scalar, st);
    const long saved_countdown = countdown;
    countdown = 0; /* the check must not fail */
    CHECK(old_is_readable() == (code != MLS_OK));
    countdown = saved_countdown;
    return code;
}

TEST(writing_survives_every_failure_and_keeps_the_old_file)
{
    write_old();
    CHECK(fail_each(write_state) >= 6);
}

static mls_code read_state(mls_status *st)
{
    int fd = -1;
    mls_safetensors file = {0};
    const mls_code code =
        mls_safetensors_open(file_path, &mls_crc_scalar, true, &fd, &file, st);
    CHECK((code == MLS_OK) == (fd >= 0) && (code == MLS_OK) == (file.tensors != NULL));
    if (fd >= 0) {
        close(fd);
    }
    mls_safetensors_fini(&file);
    return code;
}

/* The file at `file_path`, as the only one of a folder of another program. */
static mls_code index_files(mls_status *st)
{
    mls_index x = {0};
    size_t failed;
    const char *const names[] = {"file"};
    const mls_code code =
        mls_index_of_files(folder, names, 1, &mls_crc_scalar, &x, &failed, st);
    CHECK((code == MLS_OK) == (x.shard_count > 0) &&
          (x.files != NULL) == (code == MLS_OK));
    mls_index_fini(&x);
    return code;
}

TEST(opening_survives_every_failure)
{
    write_old();
    countdown = 0;
    CHECK(write_state(&status) == MLS_OK);
    CHECK(fail_each(read_state) >= 6);
    CHECK(fail_each(index_files) >= 8);
}

/* Two bytes of a shard of three, so that the block is read into a buffer. */
static mls_code read_shard(mls_status *st)
{
    const uint32_t sum = mls_crc_scalar.update(0, "old", 3);
    const mls_part all = {.rank = 1, .length = {3}, .end = 3};
    const mls_stored_shard shard = {.file = file_path,
                                    .file_bytes = 3,
                                    .item_bytes = 1,
                                    .part = &all,
                                    .crcs = &sum,
                                    .name = text("x")};
    const mls_part requested = {.rank = 1, .start = {1}, .length = {2}, .end = 2};
    unsigned char got[2] = {0};
    const mls_read_piece piece = {.shard = &shard, .to = &requested, .data = got};
    size_t failed = 77;
    const mls_code code = mls_shards_read(
        &(mls_read_request){
            .folder = -1, .pieces = &piece, .count = 1, .crc = &mls_crc_scalar},
        &failed, st);
    CHECK(failed == (code == MLS_OK ? 77U : 0U));
    CHECK(code != MLS_OK || memcmp(got, "ld", 2) == 0);
    return code;
}

TEST(reading_a_shard_survives_every_failure)
{
    write_old();
    CHECK(file_path[0] ==
          '/'); /* an absolute file_path, so that the folder does not matter */
    CHECK(fail_each(read_shard) == 6);
}

/* ---- indexes ---- */

static const size_t index_shape[] = {3, 5};
static const signed char index_axes[] = {0, MLS_NO_AXIS};
static const uint32_t index_crcs[] = {1, 2};

/* Two files; shards with axes, with blocks, and so many that the text must grow. */
static mls_code build_index(mls_json_writer *b, uint32_t *sum, mls_status *st)
{
    static const size_t long_shape[] = {(1 << 20) + 1};
    static const mls_str names[] = {{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}, {"e", 1}};
    mls_index_file files[] = {{.path = "params/x.safetensors", .bytes = 2 << 20},
                              {.path = "params/y.safetensors", .bytes = 2 << 20}};
    mls_index_shard shards[5];
    for (size_t i = 0; i < 5; i++) {
        shards[i] = (mls_index_shard){.id = {.name = names[i]},
                                      .dtype = MLS_U8,
                                      .rank = 2,
                                      .shape = index_shape,
                                      .axes = index_axes,
                                      .version = 1,
                                      .file = 1,
                                      .offset = 4096 + 15 * i,
                                      .bytes = 15};
    }
    shards[4] = (mls_index_shard){.id = {.name = names[4]},
                                  .dtype = MLS_U8,
                                  .rank = 1,
                                  .shape = long_shape,
                                  .version = 1,
                                  .offset = 4096,
                                  .bytes = long_shape[0],
                                  .crcs = index_crcs};
    const mls_index index = {.generation = "0123456789abcdef",
                             .world_size = 1,
                             .files = files,
                             .file_count = 2,
                             .shards = shards,
                             .shard_count = 5};
    return mls_index_build(&index, &mls_crc_scalar, b, sum, st);
}

static mls_code build_and_drop(mls_status *st)
{
    mls_json_writer b = {0};
    uint32_t sum = 77;
    const mls_code code = build_index(&b, &sum, st);
    CHECK(code == MLS_OK || sum == 77);
    mls_json_writer_fini(&b);
    return code;
}

TEST(building_an_index_survives_every_failure)
{
    CHECK(fail_each_with(build_and_drop, "no room for an index of 5 shards") >= 3);
}

static mls_json_writer index_text; /* input of the next job */

static mls_code parse_index(mls_status *st)
{
    mls_index index = {.rank = 77};
    const mls_code code =
        mls_index_parse(index_text.data, index_text.length, &mls_crc_scalar, &index, st);
    CHECK(code == MLS_OK ? index.shard_count == 5 : index.rank == 77);
    CHECK((code == MLS_OK) == (index.json != NULL));
    if (code == MLS_OK) {
        mls_index_fini(&index);
    }
    return code;
}

TEST(parsing_an_index_survives_every_failure)
{
    uint32_t sum;
    countdown = 0;
    CHECK(build_index(&index_text, &sum, &status) == MLS_OK);
    CHECK(fail_each(parse_index) >= 14);
    mls_json_writer_fini(&index_text);
}

/* ---- checkpoints ---- */

static mls_index committed; /* input of the next jobs */

static const size_t small_shape[] = {1000}, large_shape[] = {300000};
static unsigned char shard_bytes[300000];

/* Two small ones that share a file, a large one, and a state with axes. */
static void make_items(mls_shard_item *items)
{
    items[0] = item_of("a", NULL, MLS_U8, 1, small_shape, shard_bytes);
    items[1] = item_of("b", NULL, MLS_U8, 1, small_shape, shard_bytes);
    items[2] = item_of("c", NULL, MLS_U8, 1, large_shape, shard_bytes);
    items[3] = item_of("a", "m", MLS_U8, 2, index_shape, shard_bytes);
}

static mls_shard_job second_job(const mls_shard_item *items)
{
    mls_shard_job job = job_of(items, 4, generations[1], &committed);
    job.kernels = mls_kernels_of(MLS_CPU_SCALAR);
    job.crc = &mls_crc_scalar;
    return job;
}

static mls_code plan_shards(mls_status *st)
{
    mls_shard_item items[4];
    make_items(items);
    const mls_shard_job job = second_job(items);
    mls_write_plan plan = {.file_count = 77};
    mls_code code = mls_write_plan_init(&plan, &job, st);
    if (code == MLS_OK) {
        plan.planned[0].is_unchanged = plan.planned[0].before != NULL;
        code = mls_write_plan_reuse(&plan, st);
        code = code == MLS_OK ? mls_write_plan_assign_files(&plan, st) : code;
        CHECK(code != MLS_OK || plan.file_count == 3);
        for (size_t i = 0; code == MLS_OK && i < plan.file_count; i++) {
            code = mls_write_plan_lay_out(&plan, &plan.files[i], st);
        }
        mls_write_plan_fini(&plan);
    }
    CHECK(plan.files == NULL && plan.index.shards == NULL);
    return code;
}

/* The small items have changed; on failure only the committed files may remain. */
static mls_code write_shards(mls_status *st)
{
    mls_shard_item items[4];
    make_items(items);
    shard_bytes[0] = 1;
    items[2].version = 1;
    const mls_shard_job job = second_job(items);
    mls_shards_written written = {.shard_count = 77};
    const mls_code code = mls_shards_write(&job, &written, st);
    const long saved_countdown = countdown;
    countdown = 0; /* the check must not fail */
    CHECK(written.shard_count == (code == MLS_OK ? 4U : 77U));
    CHECK(pool_files() == (code == MLS_OK ? 4U + 3U : 4U));
    countdown = saved_countdown;
    return code;
}

/* One item that is zero, one with a changed row and one that is mostly zero: all
 * allocations of layers. */
static mls_code write_layers(mls_status *st)
{
    static unsigned char changed[300000], zeros[300000];
    mls_shard_item items[4];
    make_items(items);
    memcpy(changed, shard_bytes, sizeof changed);
    changed[70000] ^= 1;
    items[0].data = zeros;
    items[2].data = changed;
    items[3] = item_of("d", NULL, MLS_U8, 1, large_shape, zeros);
    zeros[290000] = 1;
    mls_shard_job job = second_job(items);
    job.sparse = true;
    job.incremental = true;
    mls_shards_written written = {.shard_count = 77};
    const mls_code code = mls_shards_write(&job, &written, st);
    const long saved_countdown = countdown;
    countdown = 0; /* the check must not fail */
    CHECK(written.shard_count == (code == MLS_OK ? 4U : 77U));
    CHECK(code != MLS_OK || written.new_bytes == 2 * 256);
    if (code == MLS_OK) {
        mls_index index = read_index(written.path);
        CHECK(index.shard_count == 4);
        for (size_t i = 0; i < 4; i++) {
            static const size_t layers[] = {0, 99, 2, 1};
            const mls_layers *overlays = index.shards[i].layers;
            CHECK(overlays == NULL ? layers[i] == 99 : overlays->count == layers[i]);
        }
        for (size_t i = 0; i < index.file_count; i++) {
            if (strstr(index.files[i].path, generations[1]) != NULL) {
                CHECK(unlinkat(pool_fd, index.files[i].path, 0) == 0);
            }
        }
        CHECK(unlinkat(pool_fd, written.path, 0) == 0);
        mls_index_fini(&index);
    }
    CHECK(pool_files() == 4); /* the old files */
    countdown = saved_countdown;
    return code;
}

static mls_code verify_shards(mls_status *st)
{
    mls_problems problems = {.count = 77};
    const mls_code code =
        mls_index_verify(pool_fd, &committed, &mls_crc_scalar, NULL, NULL, &problems, st);
    CHECK(problems.count == (code == MLS_OK ? 1 : 77)); /* a file is missing */
    if (code == MLS_OK) {
        mls_problems_fini(&problems);
    }
    return code;
}

static mls_code list_shards(mls_status *st)
{
    const mls_index none = {.rank = 1};
    const mls_index *const indexes[] = {&committed, &none}, *disagreeing;
    mls_merged_index merged = {.tensor_count = 77};
    const mls_code code = mls_merged_index_init(&merged, indexes, 2, &disagreeing, st);
    CHECK(merged.tensor_count == (code == MLS_OK ? 4 : 77));
    if (code == MLS_OK) {
        mls_merged_index_fini(&merged);
    }
    return code;
}

static mls_code find_patterns(mls_status *st)
{
    const mls_index indexes[] = {committed, committed};
    mls_index_pattern *patterns = mls_index_patterns_new(indexes, 2, st);
    mls_index_patterns_free(patterns, 2);
    return patterns == NULL ? st->code : MLS_OK;
}

/* The pattern of the committed index, and the places of a tensor. */
static mls_code find_shards(mls_status *st)
{
    mls_index_pattern pattern = {.group_count = 77};
    mls_json_writer bytes = {.most = 1 << 20}, places = {.most = 1 << 20};
    mls_code code = mls_index_pattern_init(&committed, &pattern, st);
    CHECK(code == MLS_OK ? pattern.known : pattern.group_count == 77);
    if (code == MLS_OK) {
        mls_index_pattern_bytes(&committed, &pattern, &bytes);
        mls_index_pattern_places(&committed, &pattern, 1, &committed.shards[0].id,
                                 &places);
        code = bytes.code != MLS_OK ? bytes.code : places.code;
        CHECK(code == MLS_OK || code == MLS_E_MEMORY);
        CHECK(code != MLS_OK || (bytes.length > 0 && places.length > 0));
        if (code != MLS_OK) {
            mls_fail(st, code, "no memory");
        }
        mls_index_pattern_fini(&pattern);
    }
    mls_json_writer_fini(&bytes);
    mls_json_writer_fini(&places);
    return code;
}

/* Plan to load a committed tensor into memory that is not packed. */
static mls_code plan_load(mls_status *st)
{
    const mls_index *const indexes[] = {&committed}, *disagreeing;
    const mls_cutting full = {0};
    const long saved_countdown = countdown;
    const char *file;
    mls_merged_index merged;
    mls_load_plan plan;
    mls_load_target target = {0};
    static unsigned char memory[1 << 20];
    countdown = 0; /* list_shards tests the merged index */
    CHECK(mls_merged_index_init(&merged, indexes, 1, &disagreeing, st) == MLS_OK);
    countdown = saved_countdown;
    mls_code code = mls_load_plan_init(&plan, &merged, 1, st);
    CHECK(code == MLS_OK || plan.items == NULL);
    if (code == MLS_OK) {
        const mls_index_shard *shard = merged.tensors[0].any_shard;
        mls_load_item *w = mls_load_plan_add(&plan, &shard->id);
        CHECK(w != NULL && mls_load_item_select(w, &full, st) == MLS_OK);
        code = mls_load_plan_find(&plan, pool_fd, &file, st);
        mls_tensor view = {.data = memory, .dtype = MLS_U16, .rank = 1, .shape = {8}};
        view.strides[0] = 4;
        code = code != MLS_OK ? code : mls_load_target_init(&target, &view, st);
        code = code != MLS_OK ? code : mls_load_plan_place_all(&plan, &target, st);
    }
    mls_load_target_fini(&target);
    mls_load_plan_fini(&plan);
    mls_merged_index_fini(&merged);
    return code;
}

/* Each job works on a committed checkpoint. */
static mls_code make_header(mls_status *st)
{
    mls_json_writer header = {.most = 1 << 20};
    const mls_code code =
        mls_shard_header_rebuild(&committed, 0, &mls_crc_scalar, &header, st);
    CHECK((code == MLS_OK) == (header.length > 0));
    mls_json_writer_fini(&header);
    return code;
}

TEST(checkpoints_survive_every_failure)
{
    mls_shard_item items[4];
    mls_shards_written written;
    countdown = 0;
    use_one_thread(); /* several would allocate in any order */
    make_items(items);
    memset(shard_bytes, 5, sizeof shard_bytes);
    const mls_shard_job job = job_of(items, 4, generations[0], NULL);
    committed = write_all(&job, &written);
    if (committed.shard_count == 4) {
        CHECK(fail_each_with(plan_shards, "no room to describe 1 shards") >= 30);
        CHECK(fail_each(write_layers) >= 30);
        CHECK(fail_each(write_shards) >= 30);
        CHECK(fail_each(list_shards) == 4);
        CHECK(fail_each(find_patterns) == 3);
        CHECK(fail_each(find_shards) >= 3);
        CHECK(fail_each_with(make_header, "no room to describe 2 shards") >= 6);
        CHECK(fail_each(plan_load) >= 6);
        CHECK(unlinkat(pool_fd, committed.files[1].path, 0) == 0);
        CHECK(fail_each_with(verify_shards, "no memory to continue") >= 20);
    }
    mls_index_fini(&committed);
}

/* ---- loading ---- */

static mls_code plan_loading(mls_status *st)
{
    /* two that are tied, and one in more pieces than the first allocation holds */
    static unsigned char to[6 << 20], from[6 << 20];
    const mls_tensor large_to = matrix_of(to, MLS_U8, 5, 1 << 20);
    const mls_tensor large_from = matrix_of(from, MLS_U8, 5, 1 << 20);
    const mls_tensor tied_to = matrix_of(to + (5 << 20), MLS_U8, 2, 100);
    const mls_tensor tied_from = matrix_of(from, MLS_U8, 2, 100);
    const mls_load_into_pair pairs[] = {{text("one"), &tied_to, &tied_from},
                                        {text("two"), &tied_to, &tied_from},
                                        {text("large"), &large_to, &large_from}};
    mls_load_into *plan = NULL;
    const mls_code code = mls_load_into_new(pairs, 3, false, 1, &plan, st);
    CHECK((code == MLS_OK) == (plan != NULL));
    mls_load_into_free(plan);
    return code;
}

TEST(planning_to_load_survives_every_failure)
{
    CHECK(fail_each(plan_loading) >= 7);
}

/* ---- names ---- */

/* A name so deep that the array of nodes must grow. */
static mls_code make_tree(mls_status *st)
{
    const mls_str list[] = {text("a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q.r.s.t.u.v.w.x.y.z"),
                            text("a.b.c"), text("b")};
    mls_name_tree *names = NULL;
    const mls_code code = mls_name_tree_new(list, 3, &names, st);
    CHECK((code == MLS_OK) == (names != NULL));
    mls_name_tree_free(names);
    return code;
}

TEST(a_tree_of_names_survives_every_failure)
{
    CHECK(fail_each(make_tree) >= 4);
}

/* ---- items of a save ---- */

/* Enough items to grow the lists, the last one not packed. */
static mls_code list_items(mls_status *st)
{
    const mls_tensor_id id = {.name = {"w", 1}};
    const mls_layout rows = {.count = 1, .steps = {{.axis = 0, .parts = 6}}};
    static unsigned char memory[64];
    mls_tensor array = {.data = memory, .dtype = MLS_U8, .rank = 1, .shape = {12}};
    mls_shard_list list = {0};
    array.strides[0] = 2;
    const mls_code code =
        mls_shard_list_add_whole(&list, &id, &array, &rows, NULL, 0, 1, st);
    CHECK(code != MLS_OK || list.count == 6);
    mls_shard_list_fini(&list);
    return code;
}

TEST(listing_items_survives_every_failure)
{
    CHECK(fail_each(list_items) >= 12);
}

/* ---- strategies ---- */

/* A layer whose allocation failed is not counted, and can be passed again. */
static mls_code decide_layers(mls_status *st)
{
    enum { LAYERS = 40 };
    char name[16];
    mls_code first = MLS_OK;
    mls_strategy s;
    mls_status ignored;
    CHECK(mls_strategy_init(&s, NULL, NULL, 1, "share", 0, st) == MLS_OK);
    for (int i = 0; i < LAYERS; i++) {
        const int length = snprintf(name, sizeof name, "layers.%d", i);
        const mls_layer_key key = {.name = {name, (size_t)length}, .hash = (uint64_t)i};
        const mls_decide_args args = {key, 10, i};
        const int chosen = mls_decide_smart(&s, &args, st);
        CHECK(s.total_bytes == 10 * s.seen.count);
        if (chosen < 0) {
            first = st->code;
            CHECK(mls_decide_smart(&s, &args, &ignored) >= 0);
        }
        CHECK(s.seen.count == (size_t)i + 1 && s.seen.layers[i].calls == 1);
    }
    mls_strategy_fini(&s);
    return first;
}

TEST(deciding_survives_every_failure)
{
    CHECK(fail_each(decide_layers) >= 9);
}

/* ---- schedules and choices ---- */

static mls_code find_schedule(mls_status *st)
{
    uint64_t seed = 4;
    test_chain r;
    random_chain_fill(&r, 7, &seed, true);
    const mls_best_options options = {.budget_bytes = 450, .offload = true};
    mls_best best = {.states = 77};
    const mls_code code = mls_best_schedule(&r.chain, &options, &best, st);
    CHECK(code == MLS_OK || best.states == 77);
    if (code == MLS_OK) {
        mls_schedule_fini(&best.schedule);
    }
    return code;
}

/* If an allocation fails, no plan is returned. */
static mls_code make_plan(size_t slots, mls_status *st)
{
    uint64_t seed = 4;
    test_chain r;
    random_chain_fill(&r, 7, &seed, true);
    const mls_plan_request request = {
        .budget_bytes = 450, .slots = slots, .offload = true};
    mls_plan plan = {.slots = 77};
    const mls_code code = mls_plan_make(&r.chain, &request, &plan, st);
    CHECK(code == MLS_OK || plan.slots == 77);
    if (code == MLS_OK) {
        mls_plan_fini(&plan);
    }
    return code;
}

static mls_code plan_to_the_byte(mls_status *st)
{
    return make_plan(0, st);
}

static mls_code plan_by_slots(mls_status *st)
{
    return make_plan(400, st);
}

/* Too few slots: a plan that fits, at any cost in time. */
static mls_code plan_that_fits(mls_status *st)
{
    return make_plan(1, st);
}

static mls_code read_curve(mls_status *st)
{
    uint64_t seed = 4;
    test_chain r;
    random_chain_fill(&r, 7, &seed, true);
    const mls_plan_request request = {.slots = 0};
    mls_plan_curve curve = {0};
    const mls_code code = mls_plan_pareto(&r.chain, &request, &curve, st);
    CHECK((code == MLS_OK) == (curve.points != NULL));
    mls_plan_curve_fini(&curve);
    return code;
}

TEST(planning_survives_every_failure)
{
    CHECK(fail_each(plan_to_the_byte) >= 30);
    CHECK(fail_each(plan_by_slots) >= 8);
    CHECK(fail_each(plan_that_fits) >= 8);
    CHECK(fail_each(read_curve) >= 30);
}

TEST(searching_for_schedules_survives_every_failure)
{
    CHECK(fail_each(find_schedule) >= 6);
}

/* ---- deltas ---- */

/* The gaps are widened too: there is one change. */
static mls_code compose_and_filter(mls_status *st)
{
    static float base[9000], changed[9000];
    const mls_tensor a = vector_of(base, MLS_F32, 9000);
    const mls_tensor b = vector_of(changed, MLS_F32, 9000);
    mls_delta delta = {0}, both = {0}, filtered = {0};
    mls_part all;
    changed[8000] = 1;
    mls_code code = mls_layout_part(&(mls_layout){0}, 1, a.shape, 0, &all, st);
    if (code == MLS_OK) {
        code = mls_delta_encode(mls_delta_kernels_of(MLS_CPU_SCALAR),
                                mls_crc_of(MLS_CPU_SCALAR), &a, &b, &delta, NULL, st);
        CHECK((code == MLS_OK) == (delta.values != NULL));
    }
    if (code == MLS_OK) {
        code = mls_delta_compose(&delta, &delta, &both, st);
        CHECK((code == MLS_OK) == (both.values != NULL));
    }
    if (code == MLS_OK) {
        code = mls_delta_filter(&both, &all, &all, &filtered, st);
        CHECK((code == MLS_OK) == (filtered.values != NULL));
    }
    mls_delta_fini(&delta);
    mls_delta_fini(&both);
    mls_delta_fini(&filtered);
    return code;
}

TEST(deltas_survive_every_failure)
{
    CHECK(fail_each(compose_and_filter) >= 9);
}
