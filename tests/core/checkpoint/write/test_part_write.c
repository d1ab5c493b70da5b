/* Parts of a tensor, written one after the other as if by several ranks: the bytes of the
 * whole tensor, and shares that add up to the checksums of its blocks. */
#include "base/memory.h"
#include "checkpoint/write/part_write.h"
#include "io/file.h"
#include "safetensors/safetensors.h"
#include "support/parts.h"
#include "support/temporary_folder.h"
#include "support/tensors.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

enum {
    ROWS = 700,
    COLUMNS = 501,
    OFFSET = 100,
    ELEMENTS = ROWS * COLUMNS,
    BYTES = ELEMENTS * 4,
    BLOCKS = 2,
    MOST_PARTS = 12
};

static const size_t shape[] = {ROWS, COLUMNS};
static const mls_crc_kernels *const crc = &mls_crc_scalar;
static uint32_t *numbers, *packed;

static bool make_memory(void)
{
    numbers = mls_alloc(ELEMENTS, sizeof *numbers);
    packed = mls_alloc(ELEMENTS, sizeof *packed);
    for (size_t i = 0; numbers != NULL && i < ELEMENTS; i++) {
        numbers[i] = (uint32_t)(i * 2654435761U);
    }
    return numbers != NULL && packed != NULL;
}

static void free_memory(void)
{
    mls_free(numbers);
    mls_free(packed);
}

/* Copy the elements of a part to `packed`; returns their number. */
static size_t pack(mls_layout layout, size_t index)
{
    const mls_part part = part_at(layout, 2, shape, index);
    const mls_part full_part = part_at((mls_layout){0}, 2, shape, 0);
    mls_overlap overlap;
    mls_run run;
    size_t count = 0;
    mls_overlap_init(&overlap, &part, &full_part);
    while (mls_overlap_next(&overlap, &run)) {
        memcpy(packed + run.a, numbers + run.b, run.count * sizeof *packed);
        count += run.count;
    }
    return count;
}

static void check_file(int fd, const uint32_t *crcs, uint64_t written)
{
    mls_status st;
    unsigned char *read = mls_alloc(BYTES, 1);
    REQUIRE(read != NULL);
    CHECK(mls_file_read_at(fd, read, BYTES, OFFSET, &st) == MLS_OK);
    CHECK(memcmp(read, numbers, BYTES) == 0 && written == BYTES);
    const size_t block = MLS_SAFETENSORS_BLOCK;
    CHECK(crcs[0] == crc->update(0, numbers, block));
    CHECK(crcs[1] == crc->update(0, (unsigned char *)numbers + block, BYTES - block));
    mls_free(read);
}

/* Return the job of writing one item to the file of the test. */
static mls_parts_job job_of(mls_placed_item *item, uint32_t *crcs, uint64_t *written)
{
    static const char *names[1];
    names[0] = file_path;
    return (mls_parts_job){.folder = AT_FDCWD,
                           .names = names,
                           .file_count = 1,
                           .items = item,
                           .count = 1,
                           .crcs = crcs,
                           .block_count = BLOCKS,
                           .written = written,
                           .written_count = 1,
                           .kernels = mls_kernels_of(MLS_CPU_SCALAR),
                           .crc = crc};
}

/* Write all parts; with `strided`, from a transposed copy of their memory. */
static void write_all(mls_layout layout, bool strided)
{
    uint32_t crcs[BLOCKS] = {0};
    uint64_t written = 0;
    const char *failed;
    const size_t parts = parts_of(layout);
    mls_status st;
    REQUIRE(make_memory());
    const int fd = open(file_path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    REQUIRE(fd >= 0);
    CHECK(parts <= MOST_PARTS);
    for (size_t i = 0; i < parts; i++) {
        const size_t count = pack(layout, i);
        mls_tensor view = vector_of(packed, MLS_F32, count);
        mls_shard_item item = {
            .dtype = MLS_F32, .rank = 2, .shape = shape, .layout = layout, .part = i};
        if (strided) { /* backwards, from the last element */
            for (size_t j = 0; j < count / 2; j++) {
                const uint32_t swapped = packed[j];
                packed[j] = packed[count - 1 - j];
                packed[count - 1 - j] = swapped;
            }
            view.data += count > 0 ? (count - 1) * sizeof *packed : 0;
            view.strides[0] = -(ptrdiff_t)sizeof *packed;
            item.strided = &view;
        } else {
            item.data = (const unsigned char *)packed;
        }
        mls_placed_item placed = {.item = &item, .offset = OFFSET, .dtype = MLS_F32};
        const mls_parts_job job = job_of(&placed, crcs, &written);
        CHECK(mls_parts_write(&job, &failed, &st) == MLS_OK);
    }
    check_file(fd, crcs, written);
    close(fd);
    free_memory();
}

TEST(parts_of_every_layout_reassemble_the_tensor)
{
    static const mls_layout layouts[] = {
        {0},
        {1, {{0, 3}}},
        {1, {{1, 4}}},
        {1, {{MLS_LAYOUT_FLAT, 7}}},
        {2, {{0, 2}, {0, 3}}},
        {2, {{1, 2}, {0, 3}}},
        {2, {{1, 3}, {MLS_LAYOUT_FLAT, 2}}},
    };
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        write_all(layouts[i], false);
        write_all(layouts[i], true);
    }
}

static bool stop(void *context, uint64_t bytes)
{
    *(uint64_t *)context += bytes;
    return false;
}

/* The whole tensor as one item. */
static mls_shard_item full_item(void)
{
    return (mls_shard_item){.dtype = MLS_F32,
                            .rank = 2,
                            .shape = shape,
                            .data = (const unsigned char *)numbers};
}

TEST(a_stop_and_a_failed_write_are_reported)
{
    uint32_t crcs[BLOCKS] = {0};
    uint64_t written = 0, progress_bytes = 0;
    const char *failed = NULL;
    REQUIRE(make_memory());
    write_text(file_path, "");
    const mls_progress progress = {stop, &progress_bytes};
    const mls_shard_item item = full_item();
    mls_placed_item placed = {.item = &item, .offset = OFFSET, .dtype = MLS_F32};
    mls_parts_job job = job_of(&placed, crcs, &written);
    job.progress = &progress;
    CHECK(mls_parts_write(&job, &failed, &status) == MLS_E_STOPPED && progress_bytes > 0);
    CHECK(failed == file_path);
    unlink(file_path);
    CHECK(mls_parts_write(&job, &failed, &status) == MLS_E_IO && failed == file_path);
    CHECK(status.os_error == ENOENT);
#ifdef __linux__
    job.names[0] = "/dev/full";
    CHECK(mls_parts_write(&job, &failed, &status) == MLS_E_IO);
    CHECK(status.os_error == ENOSPC && strcmp(failed, "/dev/full") == 0);
#endif
    free_memory();
}

TEST(items_are_written_file_by_file)
{
    enum { FILES = 2, ITEMS = 4, SMALL = 3 };
    static const size_t three[] = {SMALL};
    static const int64_t order[ITEMS][2] = {
        {1, SMALL * 4}, {0, 0}, {1, 0}, {0, SMALL * 4}};
    const char *names[FILES] = {"a", "b"};
    mls_shard_item items[ITEMS];
    mls_placed_item placed[ITEMS];
    uint32_t crcs[ITEMS] = {0};
    uint64_t written[ITEMS] = {0};
    const char *failed = NULL;
    REQUIRE(make_memory());
    const int folder_fd = open(folder, O_RDONLY | O_DIRECTORY);
    for (int i = 0; i < FILES; i++) {
        write_text(path_of(names[i]), "");
    }
    for (int i = 0; i < ITEMS; i++) {
        items[i] = (mls_shard_item){.dtype = MLS_F32,
                                    .rank = 1,
                                    .shape = three,
                                    .data = (unsigned char *)(numbers + i * SMALL)};
        placed[i] = (mls_placed_item){&items[i], order[i][0], order[i][1], i, i, MLS_F32};
    }
    mls_parts_job job = job_of(placed, crcs, written);
    job.folder = folder_fd;
    job.names = names;
    job.file_count = FILES;
    job.count = job.block_count = job.written_count = ITEMS;
    job.syncs = true;
    CHECK(mls_parts_write(&job, &failed, &status) == MLS_OK);
    for (int i = 0; i < ITEMS; i++) {
        uint32_t read[SMALL] = {0};
        const int fd = openat(folder_fd, names[order[i][0]], O_RDONLY);
        CHECK(mls_file_read_at(fd, read, sizeof read, (uint64_t)order[i][1], &status) ==
              MLS_OK);
        CHECK(memcmp(read, numbers + i * SMALL, sizeof read) == 0);
        CHECK(crcs[i] == crc->update(0, read, sizeof read) && written[i] == sizeof read);
        close(fd);
    }
    close(folder_fd);
    free_memory();
}

TEST(places_outside_the_files_are_refused)
{
    const mls_shard_item item = {.dtype = MLS_F32, .rank = 2, .shape = shape};
    const mls_placed_item wrong[] = {
        {&item, 1, 0, 0, 0, MLS_F32},          {&item, -1, 0, 0, 0, MLS_F32},
        {&item, 0, -1, 0, 0, MLS_F32},         {&item, 0, 0, 1, 0, MLS_F32},
        {&item, 0, 0, BLOCKS + 1, 0, MLS_F32}, {&item, 0, 0, -1, 0, MLS_F32},
        {&item, 0, 0, 0, 1, MLS_F32},          {&item, 0, 0, 0, -1, MLS_F32}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        uint32_t crcs[BLOCKS] = {0};
        uint64_t written = 0;
        const char *failed = file_path;
        mls_placed_item placed = wrong[i];
        const mls_parts_job job = job_of(&placed, crcs, &written);
        CHECK(mls_parts_write(&job, &failed, &status) == MLS_E_VALUE && failed == NULL);
    }
}
