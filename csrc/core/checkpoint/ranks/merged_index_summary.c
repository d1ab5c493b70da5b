/* merged_index_summary: adds up versions, bytes, stored bytes and codecs of shards.
 *
 * Sums cannot overflow, since the parser refuses an index whose bytes exceed the integers
 * of a manifest. */
#include "checkpoint/ranks/merged_index_summary.h"

/* Add up all shards of a tensor. `version` is the highest one, `sparse` the number of
 * sparse shards, and `codec` that of the last compressed place, NULL if there is none. */
mls_tensor_summary mls_tensor_summarize(const mls_merged_index *merged,
                                        const mls_merged_index_tensor *tensor)
{
    mls_tensor_summary sum = {0};
    for (size_t i = 0; i < tensor->count; i++) {
        const mls_index_shard *shard = merged->shards[tensor->from + i].shard;
        sum.bytes += shard->bytes;
        sum.stored_bytes += mls_index_stored_bytes(shard);
        sum.sparse += mls_index_is_sparse(shard) ? 1 : 0;
        sum.version = shard->version > sum.version ? shard->version : sum.version;
        for (size_t j = 0; j < mls_index_place_count(shard); j++) {
            const mls_layer place = mls_index_place(shard, j);
            if (place.frames != NULL) {
                sum.codec = mls_codec_name(place.frames->codec);
            }
        }
    }
    return sum;
}

/* Add up the uncompressed bytes of all shards, and the bytes that they take in files. */
mls_index_summary mls_index_summarize(const mls_index *index)
{
    mls_index_summary sum = {0};
    for (size_t i = 0; i < index->shard_count; i++) {
        sum.bytes += index->shards[i].bytes;
        sum.stored_bytes += mls_index_stored_bytes(&index->shards[i]);
    }
    return sum;
}

/* A compressed layer's `bytes` are compressed ones, so its frames know the uncompressed
 * size. */
uint64_t mls_layer_element_bytes(const mls_layer *layer)
{
    return layer->frames == NULL ? layer->bytes : layer->frames->bytes;
}

/* Return the uncompressed bytes of the layer's visible elements: those that no later
 * layer stores. `item_bytes` is the size of one element. */
uint64_t mls_layer_visible_bytes(const mls_layer *layer, size_t item_bytes)
{
    uint64_t elements = 0;
    for (size_t i = 0; i < layer->visible_count; i++) {
        elements += layer->visible[i].count;
    }
    return elements * item_bytes;
}
