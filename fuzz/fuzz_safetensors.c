/* libFuzzer target: any bytes as a safetensors file.  An accepted file must describe its
 * bytes exactly, and every tensor is read at the offset in the header.
 *
 * tools/fuzz.sh builds it with clang -fsanitize=fuzzer,address,undefined and all of
 * csrc/core.
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

/* The number of bytes of a shape in items, by plain multiplication: the reader has
 * checked it. */
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
    mls_status st;
    for (size_t i = 0; i < file->count; i++) {
        const mls_stored *t = &file->tensors[i];
        require((t->opaque.length > 0 || t->bytes == bytes_of(t)) && t->offset <= size);
        require((mls_stored_check(t, &st) == MLS_OK) == (t->opaque.length == 0));
        require(t->opaque.length == 0 || t->dtype == MLS_U8);
        require(t->bytes <= size - t->offset);
        require(mls_utf8_valid(t->name.data, t->name.length));
        (void)mls_crc_scalar.update(0, data + t->offset, t->bytes);
        total += t->bytes;
    }
    require(total == size - 8 - mls_load_le64(data));
    for (size_t i = 0; i < file->metadata_count; i++) {
        const mls_str_pair *pair = &file->metadata[i];
        require(mls_utf8_valid(pair->key.data, pair->key.length));
        require(mls_utf8_valid(pair->value.data, pair->value.length));
    }
}

/* Fuzzers do not guess checksums: with `verify` false the reader skips them. */
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
