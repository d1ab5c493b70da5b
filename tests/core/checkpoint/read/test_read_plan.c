/* Reads as spans and tasks, planned without any file. */
#include "checkpoint/read/read_plan.h"
#include "support/runner.h"

#include "safetensors/safetensors.h"

enum { BLOCK = MLS_SAFETENSORS_BLOCK, FEW = 6 };

/* A whole shard of bytes that starts at `offset` in `file`. */
static mls_stored_shard shard_of(const char *file, uint64_t offset, size_t bytes)
{
    static mls_part parts[64];
    static size_t used;
    mls_part *part = &parts[used++ % 64]; /* more shards than a test has */
    *part = (mls_part){.rank = 1, .length = {bytes}, .end = bytes};
    return (mls_stored_shard){.file = file,
                              .file_bytes = offset + bytes,
                              .offset = offset,
                              .item_bytes = 1,
                              .part = part,
                              .name = {"weight", 6}};
}

/* All of a shard; the destinations are never written. */
static mls_read_piece piece_of(const mls_stored_shard *shard)
{
    static unsigned char somewhere;
    return (mls_read_piece){.shard = shard, .to = shard->part, .data = &somewhere};
}

TEST(large_shard_is_split_at_blocks_and_read_completely)
{
    const size_t bytes = 40 * (size_t)BLOCK + 3;
    const mls_stored_shard shard = shard_of("a", 100, bytes);
    const mls_read_piece piece = piece_of(&shard);
    mls_read_plan plan = {0};
    size_t planned = 0, from = 0;
    REQUIRE(mls_read_plan_make(&plan, &piece, 1, &planned, &status) == MLS_OK);
    CHECK(planned == 1 && plan.count > 1 && plan.task_count > 1);
    for (size_t i = 0; i < plan.count; i++) {
        const mls_read_span *s = plan.order[i];
        CHECK(s->from == from && s->from % BLOCK == 0 && s->to == from);
        CHECK(s->at == 100 + from && s->end > from);
        from = s->end;
    }
    CHECK(from == bytes && plan.tasks[plan.task_count] == plan.count);
    mls_read_plan_fini(&plan);
}

TEST(small_shards_share_a_task_in_the_order_of_their_files)
{
    static const uint64_t offsets[FEW] = {500, 100, 300, 0, 200, 400};
    mls_stored_shard shards[FEW];
    mls_read_piece pieces[FEW];
    mls_read_plan plan = {0};
    size_t planned = 0;
    for (size_t i = 0; i < FEW; i++) {
        shards[i] = shard_of(i % 2 == 0 ? "b" : "a", offsets[i], 100);
        pieces[i] = piece_of(&shards[i]);
    }
    REQUIRE(mls_read_plan_make(&plan, pieces, FEW, &planned, &status) == MLS_OK);
    CHECK(planned == FEW && plan.count == FEW && plan.task_count == 1);
    for (size_t i = 0; i < FEW; i++) {
        CHECK_TEXT(plan.order[i]->file, i < 3 ? "a" : "b");
        CHECK(i % 3 == 0 || plan.order[i - 1]->at < plan.order[i]->at);
        CHECK(plan.spans[i].piece == &pieces[i]); /* these keep the requested order */
    }
    mls_read_plan_fini(&plan);
}

/* Destinations that are made first are filled first, whatever the names of their
 * files. */
TEST(files_are_read_in_destination_order)
{
    static const char *const files[FEW] = {"10", "10", "2", "2", "1", "1"};
    mls_stored_shard shards[FEW];
    mls_read_piece pieces[FEW];
    mls_read_plan plan = {0};
    size_t planned = 0;
    for (size_t i = 0; i < FEW; i++) {
        shards[i] = shard_of(files[i], i % 2 * 100, 100);
        pieces[i] = piece_of(&shards[i]);
    }
    REQUIRE(mls_read_plan_make(&plan, pieces, FEW, &planned, &status) == MLS_OK);
    for (size_t i = 0; i < FEW; i++) {
        CHECK(plan.order[i] == &plan.spans[i]);
    }
    mls_read_plan_fini(&plan);
}

TEST(existing_zeros_need_one_task_at_any_length)
{
    const mls_stored_shard shard = shard_of(NULL, 0, 100 * (size_t)BLOCK);
    mls_read_piece piece = piece_of(&shard);
    mls_read_plan zeros = {0}, filled = {0};
    size_t planned = 0;
    REQUIRE(mls_read_plan_make(&filled, &piece, 1, &planned, &status) == MLS_OK);
    piece.data = NULL;
    REQUIRE(mls_read_plan_make(&zeros, &piece, 1, &planned, &status) == MLS_OK);
    CHECK(zeros.count == 1 && filled.count > 1 && zeros.cost < filled.cost);
    mls_read_plan_fini(&zeros);
    mls_read_plan_fini(&filled);
}

TEST(pieces_in_front_of_a_bad_record_are_planned)
{
    mls_stored_shard good = shard_of("a", 0, 100), bad = good;
    bad.offset++;
    const mls_read_piece pieces[] = {piece_of(&good), piece_of(&bad), piece_of(&good)};
    mls_read_plan plan = {0};
    size_t planned = 0;
    CHECK_FAILS(mls_read_plan_make(&plan, pieces, 3, &planned, &status), MLS_E_FORMAT,
                "tensor 'weight', file 'a': its records exceed the length of the file");
    CHECK(planned == 1 && plan.count == 1 && plan.task_count == 1);
    CHECK_TEXT(status.name, "weight");
    CHECK_TEXT(status.expected, "at most 100 bytes");
    mls_read_plan_fini(&plan);
}

/* One thread reads all tasks of a file as one queue, unless other threads would idle. */
TEST(tasks_along_a_file_are_a_queue)
{
    const mls_stored_shard shards[] = {shard_of("a", 0, 10 * (size_t)BLOCK),
                                       shard_of("b", 0, 200 * (size_t)BLOCK),
                                       shard_of("b", 200 * (size_t)BLOCK, 7)};
    const mls_read_piece pieces[] = {piece_of(shards), piece_of(shards + 1),
                                     piece_of(shards + 2)};
    mls_read_plan plan = {0};
    size_t planned = 0, longest = 0;
    REQUIRE(mls_read_plan_make(&plan, pieces, 3, &planned, &status) == MLS_OK);
    CHECK(plan.queue_count > 2 && plan.queue_count < plan.task_count);
    CHECK(plan.queues[0] == 0 && plan.queues[plan.queue_count] == plan.task_count);
    for (size_t i = 0; i < plan.queue_count; i++) {
        const size_t begin = plan.tasks[plan.queues[i]];
        const size_t end = plan.tasks[plan.queues[i + 1]];
        CHECK(end > begin);
        CHECK_TEXT(plan.order[begin]->file, i == 0 ? "a" : "b");
        CHECK_TEXT(plan.order[end - 1]->file, i == 0 ? "a" : "b");
        longest = end - begin > longest ? end - begin : longest;
    }
    CHECK(plan.tasks[plan.queues[1]] == 3); /* all of `a`: 4, 4 and 2 blocks */
    CHECK(longest > 8 && longest < 32);
    mls_read_plan_fini(&plan);
}

TEST(empty_plan_has_no_tasks)
{
    mls_read_plan plan = {0};
    size_t planned = 9;
    CHECK(mls_read_plan_make(&plan, NULL, 0, &planned, &status) == MLS_OK);
    CHECK(planned == 0 && plan.count == 0 && plan.task_count == 0);
    CHECK(plan.queue_count == 0);
    mls_read_plan_fini(&plan);
}
