/* A reader finds damage in a written file, at its place. */
#include "io/file.h"
#include "safetensors/safetensors.h"
#include "support/temporary_folder.h"
#include "support/tensors.h"
#include "support/text.h"

#include <unistd.h>

static const mls_crc_kernels *const crc = &mls_crc_scalar;

/* Read one tensor of a file, as if it were the only one. */
static mls_code read_one(int fd, const mls_stored *tensor, bool has_crc,
                         const mls_crc_kernels *kernels, void *data)
{
    mls_stored copy = *tensor;
    const mls_safetensors only = {.tensors = &copy, .count = 1, .has_crc = has_crc};
    return mls_safetensors_read(fd, &only, &data, kernels, NULL, &status);
}

TEST(changed_tensor_is_detected_only_with_verification)
{
    float floats[4] = {1, 2, 3, 4};
    float read_back[4];
    const mls_tensor t = vector_of(floats, MLS_F32, 4);
    const mls_named_tensor tensors[] = {{text("weight"), &t}};
    const mls_safetensors_content content = {.tensors = tensors, .count = 1};
    mls_safetensors f = {0};
    int fd = -1;
    REQUIRE(mls_safetensors_write(file_path, &content, mls_kernels_of(MLS_CPU_SCALAR),
                                  crc, &status) == MLS_OK);
    REQUIRE(mls_safetensors_open(file_path, crc, true, &fd, &f, &status) == MLS_OK);
    const mls_stored *stored = &f.tensors[0];
    CHECK(read_one(fd, stored, f.has_crc, crc, read_back) == MLS_OK);
    FILE *file = fopen(file_path, "r+b");
    REQUIRE(file != NULL);
    fseek(file, (long)stored->offset + 5, SEEK_SET);
    fputc(0x55, file);
    fclose(file);
    CHECK(read_one(fd, stored, f.has_crc, crc, read_back) == MLS_E_CHECKSUM);
    CHECK_TEXT(status.name, "weight");
    CHECK(status.has_offset && status.offset == stored->offset);
    CHECK(read_one(fd, stored, f.has_crc, NULL, read_back) == MLS_OK);
    CHECK(truncate(file_path, (off_t)stored->offset + 3) == 0);
    CHECK(read_one(fd, stored, f.has_crc, crc, read_back) == MLS_E_FORMAT);
    close(fd);
    mls_safetensors_fini(&f);
}
