/* merged_index_summary: totals over the shards of a tensor, of an index, and of a layer.
 */
#ifndef MLS_MERGED_INDEX_SUMMARY_H
#define MLS_MERGED_INDEX_SUMMARY_H

#include "checkpoint/index/index.h"
#include "checkpoint/ranks/merged_index.h"
#include "checkpoint/storage/shard_layers.h"

#include <stddef.h>
#include <stdint.h>

/* Totals over all shards of a tensor. */
typedef struct mls_tensor_summary {
    uint64_t bytes;        /* uncompressed size of the shards */
    uint64_t stored_bytes; /* bytes in files */
    uint64_t version;      /* highest version */
    size_t sparse;         /* number of sparse shards */
    const char *codec; /* codec of the last compressed place; NULL: none is compressed */
} mls_tensor_summary;

/* Return the totals of the shards of a tensor, of all ranks. Takes time proportional to
 * their places. */
mls_tensor_summary mls_tensor_summarize(const mls_merged_index *merged,
                                        const mls_merged_index_tensor *tensor);

/* Uncompressed size of all shards of an index, and their bytes in files. */
typedef struct mls_index_summary {
    uint64_t bytes, stored_bytes;
} mls_index_summary;

/* Return the totals of all shards of an index. */
mls_index_summary mls_index_summarize(const mls_index *index);

/* Uncompressed bytes of all elements of a layer, and of its visible elements.
 * `item_bytes` is the size of one element. */
uint64_t mls_layer_element_bytes(const mls_layer *layer);
uint64_t mls_layer_visible_bytes(const mls_layer *layer, size_t item_bytes);

#endif
