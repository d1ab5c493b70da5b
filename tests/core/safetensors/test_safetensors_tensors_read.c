/* A reader with any number of threads finds the first damage in a file, at its place. */
#include "base/memory.h"
#include "io/file.h"
#include "safetensors/safetensors.h"
#include "support/temporary_folder.h"
#include "support/tensors.h"

#include <fcntl.h>
#include <unistd.h>

static const mls_crc_kernels *const crc = &mls_crc_scalar;

TEST(first_damage_is_reported_for_any_thread_count)
{
    enum { COUNT = 3 << 20, ITEMS = 4 };
    mls_tensor views[ITEMS];
    mls_named_tensor named[ITEMS];
    static const char *const names[ITEMS] = {"a", "b", "c", "d"};
    float *data = mls_alloc(COUNT, sizeof *data);
    for (size_t i = 0; i < ITEMS; i++) {
        views[i] = vector_of(data, MLS_F32, COUNT);
        named[i] = (mls_named_tensor){.name = {names[i], 1}, .tensor = &views[i]};
    }
    const mls_safetensors_content content = {.tensors = named, .count = ITEMS};
    REQUIRE(mls_safetensors_write(file_path, &content, mls_kernels_of(MLS_CPU_SCALAR),
                                  crc, &status) == MLS_OK);
    int fd = -1;
    mls_safetensors file = {0};
    REQUIRE(mls_safetensors_open(file_path, crc, true, &fd, &file, &status) == MLS_OK);
    const int damage = open(file_path, O_WRONLY);
    for (size_t i = 1; i < ITEMS; i++) { /* in all but the first, near the end */
        const uint64_t at = file.tensors[i].offset + file.tensors[i].bytes - 9;
        CHECK(pwrite(damage, "x", 1, (off_t)at) == 1);
    }
    (void)close(damage);
    void *places[ITEMS];
    for (size_t i = 0; i < ITEMS; i++) {
        places[i] = mls_alloc(COUNT, sizeof *data);
    }
    for (size_t threads = 1; threads <= 4; threads += EVERY(3)) {
        mls_pool *pool = NULL;
        CHECK(mls_pool_new(threads, &pool, &status) == MLS_OK);
        CHECK(mls_safetensors_read(fd, &file, places, crc, pool, &status) ==
              MLS_E_CHECKSUM);
        CHECK(strcmp(status.name, "b") == 0);
        CHECK(status.offset == file.tensors[1].offset + ((COUNT * 4 - 9) >> 20 << 20));
        /* without buffers, only compared */
        mls_status compared;
        CHECK(mls_safetensors_read(fd, &file, NULL, crc, pool, &compared) ==
              MLS_E_CHECKSUM);
        CHECK(compared.offset == status.offset && strcmp(compared.name, "b") == 0);
        CHECK(mls_safetensors_read(fd, &file, places, NULL, pool, &status) == MLS_OK);
        CHECK(memcmp(places[0], data, COUNT * sizeof *data) == 0);
        CHECK(((char *)places[3])[COUNT * 4 - 9] == 'x');
        mls_pool_free(pool);
    }
    for (size_t i = 0; i < ITEMS; i++) {
        mls_free(places[i]);
    }
    (void)close(fd);
    mls_safetensors_fini(&file);
    mls_free(data);
}
