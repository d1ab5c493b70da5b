/* Parts of a tensor, written one after the other as if by several ranks: the bytes of the
 * whole tensor, and shares that add up to the checksums of its blocks. */
#include "base/memory.h"
#include "checkpoint/write/part_write.h"
#include "io/file.h"
#include "safetensors/safetensors.h"
#include "support/runner.h"

#include <stdlib.h>
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
static unsigned char buffer[MLS_PART_STEP];
static uint32_t *numbers, *packed;
static char path[160];

static bool make_memory(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/mlstate-part-XXXXXX", base ? base : "/tmp");
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
static size_t pack(const mls_layout *layout, size_t index)
{
    const mls_layout all = {0};
    mls_part part, whole;
    mls_overlap overlap;
    mls_run run;
    mls_status st;
    size_t count = 0;
    CHECK(mls_layout_part(layout, 2, shape, index, &part, &st) == MLS_OK);
    CHECK(mls_layout_part(&all, 2, shape, 0, &whole, &st) == MLS_OK);
    mls_overlap_init(&overlap, &part, &whole);
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

/* Write all parts; with `strided`, from a transposed copy of their memory. */
static void write_all(mls_layout layout, bool strided)
{
    uint32_t crcs[BLOCKS] = {0};
    uint64_t written = 0, started = 0;
    size_t parts = 0;
    mls_status st;
    REQUIRE(make_memory());
    const int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    const mls_part_writer writer = {mls_kernels_of(MLS_CPU_SCALAR), crc, NULL, buffer};
    const mls_tensor_place place = {fd, OFFSET, crcs, &written, &started};
    CHECK(mls_layout_parts(&layout, &parts, &st) == MLS_OK && parts <= MOST_PARTS);
    for (size_t i = 0; i < parts; i++) {
        const size_t count = pack(&layout, i);
        mls_tensor view;
        mls_shard_item item = {
            .dtype = MLS_F32, .rank = 2, .shape = shape, .layout = layout, .part = i};
        CHECK(mls_tensor_init(&view, packed, MLS_F32, 1, &count, &st) == MLS_OK);
        if (strided) { /* backwards, from the last element */
            for (size_t j = 0; j < count / 2; j++) {
                const uint32_t kept = packed[j];
                packed[j] = packed[count - 1 - j];
                packed[count - 1 - j] = kept;
            }
            view.data += count > 0 ? (count - 1) * sizeof *packed : 0;
            view.strides[0] = -(ptrdiff_t)sizeof *packed;
            item.strided = &view;
        } else {
            item.data = (const unsigned char *)packed;
        }
        CHECK(mls_part_write(&writer, &item, &place, &st) == MLS_OK);
    }
    check_file(fd, crcs, written);
    close(fd);
    unlink(path);
    free_memory();
}

TEST(parts_of_every_layout_make_the_tensor)
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

TEST(a_stop_and_a_failed_write_are_reported)
{
    uint32_t crcs[BLOCKS] = {0};
    uint64_t written = 0, started = 0, told = 0;
    REQUIRE(make_memory());
    const int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    const mls_progress progress = {stop, &told};
    const mls_part_writer writer = {mls_kernels_of(MLS_CPU_SCALAR), crc, &progress,
                                    buffer};
    const mls_shard_item item = {.dtype = MLS_F32,
                                 .rank = 2,
                                 .shape = shape,
                                 .data = (const unsigned char *)numbers};
    mls_tensor_place place = {fd, OFFSET, crcs, &written, &started};
    CHECK(mls_part_write(&writer, &item, &place, &status) == MLS_E_STOPPED && told > 0);
    place.fd = -1;
    CHECK(mls_part_write(&writer, &item, &place, &status) == MLS_E_IO);
    close(fd);
    unlink(path);
    free_memory();
}
