/* index_write: writes an index as text: its tables, their columns, and the order of all
 * members.
 *
 * The order of members and the form of numbers are fixed, so that an index has the same
 * bytes on every machine.
 *
 * The text has tables of files, kinds, shards and layers. A kind is the set of properties
 * that many shards share. The table of layers has a row for each place, a byte range of a
 * file: one for a plain shard, else one for each layer of the shard.
 *
 * Nothing is checked here: index.h lists the caller's duties. */
#include "checkpoint/index/index.h"

#include "base/memory.h"
#include "io/json_checksum.h"
#include "safetensors/safetensors.h"

#include <string.h>

/* The longest text that the JSON reader accepts, so that we can read
 * everything we write. */
#define TEXT_MOST (((size_t)512 << 20) - 1)

/* A member with any string as its value. Keys include their comma, quotes and colon, so
 * that a member takes two appends and no format string is parsed. */
static void put_string(mls_json_writer *json, const char *key, mls_str text)
{
    mls_json_writer_text(json, key);
    mls_json_writer_json(json, text);
}

/* Append a key, see put_string, and a number. */
static void put_number(mls_json_writer *json, const char *key, uint64_t number)
{
    mls_json_writer_text(json, key);
    mls_json_writer_number(json, number);
}

/* Append a key, see put_string, and a string that ends at its NUL. */
static void put_text(mls_json_writer *json, const char *key, const char *text)
{
    put_string(json, key, (mls_str){text, strlen(text)});
}

/* Append `count` checksums, each with 8 hexadecimal digits and no separator. */
static void put_crcs(mls_json_writer *json, const uint32_t *crcs, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char digits[MLS_CRC_DIGITS];
        mls_crc_to_digits(crcs[i], digits);
        mls_json_writer_put(json, digits, sizeof digits);
    }
}

/* Append a digest: 32 hexadecimal digits, the first lane first. */
static void put_digest(mls_json_writer *json, const mls_digest *digest)
{
    for (int lane = 0; lane < MLS_DIGEST_LANES; lane++) {
        const uint64_t number = digest->lanes[lane];
        put_crcs(json, (uint32_t[]){(uint32_t)(number >> 32), (uint32_t)number}, 2);
    }
}

/* Append the dimensions, separated by commas: 4,6 */
static void put_shape(mls_json_writer *json, const mls_index_shard *s)
{
    for (int i = 0; i < s->rank; i++) {
        put_number(json, i == 0 ? "" : ",", s->shape[i]);
    }
}

/* Append the member for a layout, with a leading comma: ,"layout":[[0,4],["flat",2]].
 * Each step is [axis or name of a special step, number of parts]. */
static void put_layout(mls_json_writer *json, const mls_layout *layout)
{
    mls_json_writer_text(json, ",\"layout\":[");
    for (int i = 0; i < layout->count; i++) {
        mls_json_writer_text(json, i == 0 ? "[" : ",[");
        const char *name = mls_layout_step_name(layout->steps[i].axis);
        if (name != NULL) {
            put_text(json, "", name);
        } else {
            mls_json_writer_number(json, (uint64_t)layout->steps[i].axis);
        }
        put_number(json, ",", layout->steps[i].parts);
        mls_json_writer_text(json, "]");
    }
    mls_json_writer_text(json, "]");
}

/* Append a shard's object without its closing brace: all members if `is_complete`,
 * otherwise only those of its kind, which many shards share: all but name, shape and
 * part. Defaults (no state, the parameter's axes, no tier) are omitted, so that equal
 * shards have equal text. */
static void put_members(mls_json_writer *json, const mls_index_shard *s, bool is_complete)
{
    put_text(json, "{\"section\":", mls_section_name(s->id.section));
    if (is_complete) {
        put_string(json, ",\"name\":", s->id.name);
    }
    if (s->id.has_state) {
        put_string(json, ",\"state\":", s->id.state);
    }
    put_text(json, ",\"dtype\":", mls_dtype_of(s->dtype)->file_name);
    if (is_complete) {
        mls_json_writer_text(json, ",\"shape\":[");
        put_shape(json, s);
        mls_json_writer_text(json, "]");
    }
    put_layout(json, &s->layout);
    if (is_complete) {
        put_number(json, ",\"part\":", s->part);
    }
    for (int i = 0; s->axes != NULL && i < s->rank; i++) {
        mls_json_writer_text(json, i == 0 ? ",\"axes\":[" : ",");
        if (s->axes[i] == MLS_NO_AXIS) {
            mls_json_writer_text(json, "null");
        } else {
            mls_json_writer_number(json, (uint64_t)s->axes[i]);
        }
        mls_json_writer_text(json, i == s->rank - 1 ? "]" : "");
    }
    if (s->tier != MLS_TIER_NONE) {
        put_text(json, ",\"tier\":", mls_tier_name(s->tier));
    }
}

/* Append the members of a shard, but no layers: a later save may add layers while it
 * keeps the shard's header in a file. */
void mls_index_put_shard(mls_json_writer *json, const mls_index_shard *s)
{
    put_members(json, s, true);
    put_number(json, ",\"version\":", s->version);
}

/* Append the compressed lengths of all frames as one string: "61044,59812". A compressed
 * layer has at least one frame. */
static void put_frames(mls_json_writer *json, const mls_compressed_frames *frames)
{
    const size_t count = mls_compressed_frames_count(frames->bytes);
    for (size_t i = 0; i < count; i++) {
        put_number(json, i == 0 ? "\"" : ",",
                   frames->ends[i] - mls_compressed_frame_begin(frames, i));
    }
    mls_json_writer_text(json, "\"");
}

/* Append the row ranges of a layer as one string: "0,2,17,1" means skip 0 rows, hold 2,
 * skip 17, hold 1. Rows behind the last range are omitted. One string instead of many
 * JSON numbers, because there may be thousands of them and JSON values are slow to
 * parse. */
static void put_rows(mls_json_writer *json, const mls_layer *layer)
{
    size_t end = 0; /* end of the previous range */
    for (size_t i = 0; i < layer->stored_count; i++) {
        const mls_row_range *range = &layer->stored[i];
        /* the shard's last row may be short, and only the last range can contain it */
        const size_t rows =
            range->count / layer->row + (range->count % layer->row != 0 ? 1 : 0);
        put_number(json, i == 0 ? "\"" : ",", (range->begin - end) / layer->row);
        put_number(json, ",", rows);
        end = range->begin + range->count;
    }
    mls_json_writer_text(json, "\"");
}

/* Append the members of a layer that describe its coding, each with a leading comma: a
 * full layer has no rows, an uncompressed layer has no frames. */
void mls_index_put_layer(mls_json_writer *json, const mls_layer *layer)
{
    if (layer->row != 0) {
        put_number(json, ",\"row\":", layer->row);
        mls_json_writer_text(json, ",\"rows\":");
        put_rows(json, layer);
    }
    if (layer->frames != NULL) {
        put_text(json, ",\"codec\":", mls_codec_name(layer->frames->codec));
        mls_json_writer_text(json, ",\"frames\":");
        put_frames(json, layer->frames);
    }
}

/* ---- kinds ---- */

/* A shard is compared with at most this many of the latest kinds before it gets a new
 * kind. So the time is linear in the number of shards, even if there are many kinds. */
enum { KINDS_COMPARED = 32 };

typedef struct kind_table {
    size_t *firsts, count; /* the first shard of each kind; number of kinds */
    size_t *of_shards;     /* the kind of each shard */
} kind_table;

/* Return whether two shards have the same kind: put_members writes the same text for
 * both. */
static bool is_same_kind(const mls_index_shard *a, const mls_index_shard *b)
{
    const bool axes = a->axes != NULL && a->rank > 0;
    return a->id.section == b->id.section && a->id.has_state == b->id.has_state &&
           (!a->id.has_state || mls_str_compare(a->id.state, b->id.state) == 0) &&
           a->dtype == b->dtype && a->tier == b->tier &&
           axes == (b->axes != NULL && b->rank > 0) &&
           (!axes ||
            (a->rank == b->rank && memcmp(a->axes, b->axes, (size_t)a->rank) == 0)) &&
           mls_layout_equal(&a->layout, &b->layout);
}

/* Give each shard the number of its kind: `of_shards[i]` is the kind of shard i, and
 * `firsts[k]` the first shard of kind k. Both lists share one allocation, which the
 * caller frees at `firsts`; `firsts` is NULL if memory runs out. */
static kind_table number_kinds(const mls_index *index)
{
    kind_table t = {.firsts = mls_alloc(index->shard_count, 2 * sizeof *t.firsts)};
    if (t.firsts == NULL) {
        return t;
    }
    t.of_shards = t.firsts + index->shard_count;
    for (size_t i = 0; i < index->shard_count; i++) {
        const size_t least = t.count < KINDS_COMPARED ? 0 : t.count - KINDS_COMPARED;
        size_t kind = t.count;
        /* search backwards: neighbours usually have the same kind */
        while (kind > least &&
               !is_same_kind(&index->shards[t.firsts[kind - 1]], &index->shards[i])) {
            kind--;
        }
        /* none of the compared kinds is equal */
        if (kind == least) {
            t.firsts[t.count++] = i;
            kind = t.count;
        }
        t.of_shards[i] = kind - 1;
    }
    return t;
}

/* Append the array of kinds. Each kind is described by its first shard, number
 * `kinds->firsts[k]`. */
static void put_kinds(mls_json_writer *json, const mls_index *index,
                      const kind_table *kinds)
{
    mls_json_writer_text(json, ",\n\"kinds\":[");
    for (size_t i = 0; i < kinds->count; i++) {
        mls_json_writer_text(json, i == 0 ? "\n" : ",\n");
        put_members(json, &index->shards[kinds->firsts[i]], false);
        mls_json_writer_text(json, "}");
    }
    mls_json_writer_text(json, "]");
}

/* ---- tables: one line for each column ---- */

/* The columns of the table of shards, then, from FILE_NUMBER on, those of the table of
 * layers. LAYER_COUNT, DIGEST and columns from BLOCKS on may be omitted, and those from
 * ROWS on are arrays. */
typedef enum table_column {
    NAME,
    KIND,
    SHAPE,
    PART,
    VERSION,
    LAYER_COUNT,
    DIGEST,
    FILE_NUMBER,
    OFFSET,
    BYTES,
    CRC,
    BLOCKS,
    ROW,
    ROWS,
    CODEC,
    FRAMES,
    TABLE_COLUMNS
} table_column;

/* Text before a column's values, between two values, and after them. */
static const char *const column_marks[TABLE_COLUMNS][3] = {
    [NAME] = {",\n\"shards\":{\n\"name\":[", ",", "]"},
    [KIND] = {",\n\"kind\":\"", ",", "\""},
    [SHAPE] = {",\n\"shape\":\"", "", "\""},
    [PART] = {",\n\"part\":\"", ",", "\""},
    [VERSION] = {",\n\"version\":\"", ",", "\""},
    [LAYER_COUNT] = {",\n\"layer_count\":\"", ",", "\""},
    [DIGEST] = {",\n\"digest\":\"", "", "\""},
    [FILE_NUMBER] = {"},\n\"layers\":{\n\"file\":\"", ",", "\""},
    [OFFSET] = {",\n\"offset\":\"", ",", "\""},
    [BYTES] = {",\n\"bytes\":\"", ",", "\""},
    [CRC] = {",\n\"crc32c\":\"", "", "\""},
    [BLOCKS] = {",\n\"blocks\":\"", "", "\""},
    [ROW] = {",\n\"row\":\"", ",", "\""},
    [ROWS] = {",\n\"rows\":[", ",", "]"},
    [CODEC] = {",\n\"codec\":[", ",", "]"},
    [FRAMES] = {",\n\"frames\":[", ",", "]"}};

/* Return whether the row of a shard `s`, or of its `layer`, needs a value in this column.
 * Other rows have the column's default, and a column that no row needs is omitted.
 * `layer` is not read for columns of the shard table. */
static bool row_has_value(table_column column, const mls_index_shard *s,
                          const mls_layer *layer)
{
    switch (column) {
    case LAYER_COUNT:
        return mls_index_place_count(s) != 1;
    case DIGEST:
        return s->has_digest;
    case BLOCKS:
        return mls_safetensors_blocks(layer->bytes) > 1;
    case ROW:
    case ROWS:
        return layer->row != 0;
    case CODEC:
    case FRAMES:
        return layer->frames != NULL;
    default:
        return true;
    }
}

/* Append the value of shard `s`, or of one of its layers, in a column that has a value
 * there. `kind` is the number of the shard's kind. Columns of the shard table do not read
 * `layer`. */
static void put_value(mls_json_writer *json, table_column column,
                      const mls_index_shard *s, size_t kind, const mls_layer *layer)
{
    switch (column) {
    case NAME:
        mls_json_writer_json(json, s->id.name);
        break;
    case SHAPE:
        put_shape(json, s);
        mls_json_writer_text(json, ";");
        break;
    case DIGEST:
        put_digest(json, &s->digest);
        break;
    case CRC:
        put_crcs(json, &layer->crc, 1);
        break;
    case BLOCKS:
        put_crcs(json, layer->crcs,
                 row_has_value(column, s, layer) ? mls_safetensors_blocks(layer->bytes)
                                                 : 0);
        break;
    case ROWS:
        put_rows(json, layer);
        break;
    case CODEC:
        put_text(json, "", mls_codec_name(layer->frames->codec));
        break;
    case FRAMES:
        put_frames(json, layer->frames);
        break;
    default:
        mls_json_writer_number(json, column == KIND          ? kind
                                     : column == PART        ? s->part
                                     : column == VERSION     ? s->version
                                     : column == LAYER_COUNT ? mls_index_place_count(s)
                                     : column == FILE_NUMBER ? layer->file
                                     : column == OFFSET      ? layer->offset
                                     : column == BYTES       ? layer->bytes
                                                             : layer->row);
    }
}

/* Return the number of rows that a shard takes in the column's table: one in the table of
 * shards, one for each place in the table of layers. */
static size_t count_rows(table_column column, const mls_index_shard *s)
{
    return column < FILE_NUMBER ? 1 : mls_index_place_count(s);
}

/* Return the layer in row `number` of shard `s`; zeroed for columns of the shard
 * table. */
static mls_layer layer_of(table_column column, const mls_index_shard *s, size_t number)
{
    return column < FILE_NUMBER ? (mls_layer){0} : mls_index_place(s, number);
}

/* Return whether the index contains this column: LAYER_COUNT, DIGEST and those from
 * BLOCKS on only if some row has a value, the others always. */
static bool is_column_needed(table_column column, const mls_index *index)
{
    bool needed = column != LAYER_COUNT && column != DIGEST && column < BLOCKS;
    for (size_t i = 0; !needed && i < index->shard_count; i++) {
        const mls_index_shard *s = &index->shards[i];
        for (size_t j = 0; !needed && j < count_rows(column, s); j++) {
            const mls_layer layer = layer_of(column, s, j);
            needed = row_has_value(column, s, &layer);
        }
    }
    return needed;
}

/* Append one column: its values for all shards, or for all layers of all shards.
 * `kinds[i]` is the number of shard i's kind, see number_kinds. A layer without a value
 * gets null in a column that is an array; in one of numbers, 0. */
static void put_column(mls_json_writer *json, table_column column, const mls_index *index,
                       const size_t *kinds)
{
    const char *const *marks = column_marks[column];
    const bool nulls = column >= ROWS;
    mls_json_writer_text(json, marks[0]);
    for (size_t i = 0, row = 0; i < index->shard_count; i++) {
        const mls_index_shard *s = &index->shards[i];
        for (size_t j = 0; j < count_rows(column, s); j++, row++) {
            const mls_layer layer = layer_of(column, s, j);
            mls_json_writer_text(json, row == 0 ? "" : marks[1]);
            if (nulls && !row_has_value(column, s, &layer)) {
                mls_json_writer_text(json, "null");
            } else {
                put_value(json, column, s, kinds[i], &layer);
            }
        }
    }
    mls_json_writer_text(json, marks[2]);
}

/* Append the table of files: an array of paths, and two string columns with their lengths
 * and header checksums. */
static void put_files(mls_json_writer *json, const mls_index *index)
{
    const mls_index_file *files = index->files;
    mls_json_writer_text(json, ",\n\"files\":{\n\"path\":[");
    for (size_t i = 0; i < index->file_count; i++) {
        put_text(json, i == 0 ? "" : ",", files[i].path);
    }
    mls_json_writer_text(json, "],\n\"bytes\":\"");
    for (size_t i = 0; i < index->file_count; i++) {
        put_number(json, i == 0 ? "" : ",", files[i].bytes);
    }
    mls_json_writer_text(json, "\",\n\"header_crc32c\":\"");
    for (size_t i = 0; i < index->file_count; i++) {
        put_crcs(json, &files[i].header_crc, 1);
    }
    mls_json_writer_text(json, "\"}");
}

/* Append the whole index. A writer that failed ignores further appends, so its code is
 * checked once, at the end. The JSON checksum is set last and covers all other bytes;
 * `*crc_out`, which a manifest records, also covers that checksum's digits. */
mls_code mls_index_build(const mls_index *index, const mls_crc_kernels *crc,
                         mls_json_writer *out, uint32_t *crc_out, mls_status *st)
{
    mls_json_writer *json = out;
    kind_table kinds = number_kinds(index);
    json->code = kinds.firsts == NULL ? MLS_E_MEMORY : json->code;
    json->most = TEXT_MOST;
    put_number(json,
               MLS_JSON_CHECKSUM_START
               ",\n\"format\":\"mlstate.index\",\"format_version\":",
               MLS_INDEX_VERSION);
    put_text(json, ",\n\"generation\":", index->generation);
    put_number(json, ",\"rank\":", index->rank);
    put_number(json, ",\"world_size\":", index->world_size);
    put_files(json, index);
    put_kinds(json, index, &kinds);
    for (table_column column = 0; json->code == MLS_OK && column < TABLE_COLUMNS;
         column++) {
        if (is_column_needed(column, index)) {
            put_column(json, column, index, kinds.of_shards);
        }
    }
    mls_json_writer_text(json, "}}\n");
    mls_free(kinds.firsts);
    if (json->code != MLS_OK) {
        return mls_fail(st, json->code, "no room for an index of %zu shards",
                        index->shard_count);
    }
    mls_json_checksum_set(json->data, json->length, crc);
    *crc_out = crc->update(0, json->data, json->length);
    return MLS_OK;
}
