/* libFuzzer target: any bytes as a safetensors file.  What is accepted must describe the
 * bytes exactly, and every tensor is read from where the header says it lies.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -Icsrc/core \
 *       fuzz/fuzz_safetensors.c csrc/core/{safetensors_read,json,fsio,mem,status}.c \
 *       csrc/core/{dtype,cpu}.c csrc/core/crc32c*.c
 */
#include "safetensors/safetensors.h"

#include "base/size.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

/* Bytes that a shape takes, by plain multiplication: the reader bounded them. */
static size_t bytes_of(const mls_stored *t)
{
    size_t bytes = mls_dtype_of(t->dtype)->item_bytes;
    for (int axis = 0; axis < t->rank; axis++) {
        require(mls_size_mul(bytes, t->shape[axis], &bytes));
    }
    return bytes;
}

static void check_file(const mls_safetensors *file, const uint8_t *data, size_t size)
{
    size_t total = 0;
    for (size_t i = 0; i < file->count; i++) {
        const mls_stored *t = &file->tensors[i];
        require(t->bytes == bytes_of(t) && t->offset <= size);
        require(t->bytes <= size - t->offset);
        require(mls_utf8_valid(t->name.data, t->name.length));
        (void)mls_crc_scalar.update(0, data + t->offset, t->bytes);
        total += t->bytes;
    }
    require(total == size - 8 - mls_load_le64(data));
    for (size_t i = 0; i < file->metadata_count; i++) {
        const mls_text_pair *pair = &file->metadata[i];
        require(mls_utf8_valid(pair->key.data, pair->key.length));
        require(mls_utf8_valid(pair->value.data, pair->value.length));
    }
}

/* Fuzzers do not guess checksums: `verify` false lets them past ours. */
static void try_parse(const uint8_t *data, size_t size, bool verify)
{
    mls_safetensors file = {0};
    mls_status st;
    const mls_code code =
        mls_safetensors_parse(data, size, size, &mls_crc_scalar, verify, &file, &st);
    if (code == MLS_OK) {
        check_file(&file, data, size);
        mls_safetensors_fini(&file);
        return;
    }
    require(code == MLS_E_FORMAT || code == MLS_E_CHECKSUM);
    require(file.tensors == NULL && file.json == NULL && st.text[0] != '\0');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    try_parse(data, size, true);
    try_parse(data, size, false);
    return 0;
}
