/* libFuzzer target: any bytes as an index, with a corrected checksum so that the reader
 * continues. An accepted index must fit its files, its tensors and the address space, and
 * must be the same after writing and reading it again.
 *
 * tools/fuzz.sh builds it with clang -fsanitize=fuzzer,address,undefined and all of
 * csrc/core.
 */
#include "checkpoint/index/index.h"

#include "base/size.h"
#include "io/json_checksum.h"
#include "safetensors/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static const mls_crc_kernels *const crc = &mls_crc_scalar;

/* A path of exactly two parts, the second one a plain name. */
static void check_path(const char *path)
{
    const size_t length = strlen(path);
    require(length > 0 && length <= MLS_PATH_BYTES);
    require(strncmp(path, "params/", 7) == 0 || strncmp(path, "optim_state/", 12) == 0 ||
            strncmp(path, "states/", 7) == 0);
    const char *name = strchr(path, '/') + 1;
    require(name[0] != '.' && strchr(name, '/') == NULL && strchr(name, '\\') == NULL);
    require(strcmp(path + length - 12, ".safetensors") == 0);
}

/* A list of row ranges: ascending, disjoint, not empty, within the shard. */
static size_t check_row_ranges(const mls_row_range *list, size_t count, size_t elements)
{
    size_t end = 0, sum = 0;
    for (size_t i = 0; i < count; i++) {
        require(list[i].count > 0 && list[i].begin >= end && list[i].begin <= elements);
        require(list[i].count <= elements - list[i].begin);
        end = list[i].begin + list[i].count;
        sum += list[i].count;
    }
    return sum;
}

/* The frames of a layer: a length for each, none empty, none longer than its content,
 * together as long as the layer. */
static void check_frames(const mls_layer *layer, size_t size, size_t element_count)
{
    const mls_compressed_frames *frames = layer->frames;
    const size_t count = mls_compressed_frames_count(element_count * size);
    require(frames->codec < MLS_CODEC_COUNT && frames->item == size);
    require(count > 0 && frames->bytes == element_count * size);
    for (size_t i = 0; i < count; i++) {
        const size_t begin = mls_compressed_frame_begin(frames, i);
        require(frames->ends[i] > begin);
        require(frames->ends[i] - begin <= mls_compressed_frame_bytes(frames, i));
    }
    require(frames->ends[count - 1] == layer->bytes);
}

/* The layers of a sparse shard; together they show each element once. */
static void check_layers(const mls_index *x, const mls_index_shard *s)
{
    const size_t size = mls_dtype_of(s->dtype)->item_bytes, all = s->bytes / size;
    const mls_layers *layers = s->layers;
    size_t visible = check_row_ranges(layers->zeros, layers->zero_count, all);
    require(layers->count <= MLS_LAYERS_MOST);
    for (size_t i = 0; i < layers->count; i++) {
        const mls_layer *layer = &layers->list[i];
        const size_t stored =
            layer->row == 0 ? all
                            : check_row_ranges(layer->stored, layer->stored_count, all);
        require(layer->bytes > 0 && layer->file < x->file_count);
        require(layer->offset <= x->files[layer->file].bytes);
        require(layer->bytes <= x->files[layer->file].bytes - layer->offset);
        require(layer->row > 0 || i == 0);
        if (layer->frames != NULL) {
            check_frames(layer, size, stored);
        } else {
            require(layer->bytes == stored * size);
        }
        visible += check_row_ranges(layer->visible, layer->visible_count, all);
        for (size_t j = 0; j < layer->visible_count; j++) {
            require(layer->visible[j].at <= stored);
            require(layer->visible[j].count <= stored - layer->visible[j].at);
        }
        uint32_t sum = 0;
        for (size_t j = 0; j < mls_safetensors_blocks(layer->bytes); j++) {
            sum ^= layer->crcs[j]; /* reads every checksum */
        }
        require(mls_safetensors_blocks(layer->bytes) != 1 || sum == layer->crc);
    }
    require(visible == all);
}

/* The members of one shard. */
static void check_shard(const mls_index *x, const mls_index_shard *s)
{
    const mls_part part = mls_index_part(s);
    const size_t blocks = mls_safetensors_blocks(s->bytes);
    size_t bytes;
    uint32_t sum = 0;
    require(mls_utf8_valid(s->id.name.data, s->id.name.length));
    require(!s->id.has_state || s->id.section == MLS_OPTIM_STATE);
    require(s->rank >= 0 && s->rank <= MLS_LAYOUT_RANK && part.rank == s->rank);
    for (int i = 0; i < s->rank; i++) {
        require(part.start[i] <= s->shape[i]);
        require(part.length[i] <= s->shape[i] - part.start[i]);
        require(s->axes == NULL ||
                (s->axes[i] >= MLS_NO_AXIS && s->axes[i] < MLS_LAYOUT_RANK));
    }
    require(
        mls_size_mul(mls_part_count(&part), mls_dtype_of(s->dtype)->item_bytes, &bytes));
    require(bytes == s->bytes && s->version > 0);
    if (s->layers != NULL) {
        check_layers(x, s);
        return;
    }
    require(s->file < x->file_count);
    require(s->offset <= x->files[s->file].bytes);
    require(s->bytes <= x->files[s->file].bytes - s->offset);
    for (size_t i = 0; i < blocks; i++) {
        sum ^= s->crcs[i]; /* reads every checksum */
    }
    require(blocks != 1 || sum == s->crc);
}

/* The promises that the header makes for an accepted index. */
static void check_index(const mls_index *x)
{
    require(strlen(x->generation) == MLS_GENERATION_DIGITS && x->rank < x->world_size);
    for (size_t i = 0; i < x->file_count; i++) {
        check_path(x->files[i].path);
    }
    for (size_t i = 0; i < x->shard_count; i++) {
        const mls_index_shard *s = &x->shards[i];
        check_shard(x, s);
        require(i == 0 || mls_index_compare(&s[-1], s) < 0);
        for (size_t j = 0; j < i && j < 50; j++) {
            const mls_index_shard *other = &x->shards[j];
            require(other->layers != NULL || s->layers != NULL ||
                    other->file != s->file || other->bytes == 0 || s->bytes == 0 ||
                    other->offset + other->bytes <= s->offset ||
                    s->offset + s->bytes <= other->offset);
        }
    }
}

/* Writing and reading an index gives the same index and the same text. */
static void check_round_trip(const mls_index *x)
{
    mls_json_writer first = {0}, second = {0};
    mls_index back;
    mls_status st;
    uint32_t sum;
    require(mls_index_build(x, crc, &first, &sum, &st) == MLS_OK);
    require(mls_index_parse(first.data, first.length, crc, &back, &st) == MLS_OK);
    require(back.file_count == x->file_count && back.shard_count == x->shard_count);
    require(mls_index_build(&back, crc, &second, &sum, &st) == MLS_OK);
    require(first.length == second.length &&
            memcmp(first.data, second.data, first.length) == 0);
    mls_index_fini(&back);
    mls_json_writer_fini(&first);
    mls_json_writer_fini(&second);
}

static void try_parse(const char *text, size_t length)
{
    mls_index index = {.rank = 77};
    mls_status st;
    const mls_code code = mls_index_parse(text, length, crc, &index, &st);
    if (code == MLS_OK) {
        check_index(&index);
        check_round_trip(&index);
        mls_index_fini(&index);
        return;
    }
    require(code == MLS_E_FORMAT || code == MLS_E_CHECKSUM);
    require(index.rank == 77 && index.shards == NULL && st.text[0] != '\0');
}

/* Fuzzers do not guess checksums, so the start of an index, with the right checksum,
 * replaces the first bytes. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const size_t start = sizeof MLS_JSON_CHECKSUM_START - 1;
    char *text = malloc(size + 1); /* so that reads past the end are noticed */
    require(text != NULL);
    memcpy(text, data, size);
    try_parse(text, size);
    if (size >= start) {
        memcpy(text, MLS_JSON_CHECKSUM_START, start);
        (void)mls_json_checksum_set(text, size, crc);
        try_parse(text, size);
    }
    free(text);
    return 0;
}
