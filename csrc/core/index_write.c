/* index_write: indexes as text.
 *
 * Members come in one order and numbers in one form, so that the same index gives the
 * same bytes on every machine.
 *
 * Nothing is checked here: index.h says what the caller answers for.
 */
#include "index.h"

#include "safetensors.h"
#include "seal.h"

#include <string.h>

/* The longest text that the JSON reader takes: what we write, we can read. */
#define TEXT_MOST (((size_t)512 << 20) - 1)

/* A member whose value is any text.  Keys bring their comma, quotes and colon along, so
 * that a member is two appends and no format is parsed. */
static void put_string(mls_buffer *b, const char *key, mls_text text)
{
    mls_buffer_text(b, key);
    mls_buffer_json(b, text);
}

/* A member whose value is a count. */
static void put_number(mls_buffer *b, const char *key, uint64_t number)
{
    mls_buffer_text(b, key);
    mls_buffer_number(b, number);
}

/* A member whose value is one of our own words. */
static void put_plain(mls_buffer *b, const char *key, const char *text)
{
    put_string(b, key, (mls_text){text, strlen(text)});
}

/* The digits of `count` checksums as one string: to the JSON reader that is one value,
 * however many blocks the shard has, and the text is shorter than that of a list. */
static void put_crcs(mls_buffer *b, const char *key, const uint32_t *crcs, size_t count)
{
    mls_buffer_text(b, key);
    mls_buffer_text(b, "\"");
    for (size_t i = 0; i < count; i++) {
        char digits[MLS_CRC_DIGITS];
        mls_crc_to_digits(crcs[i], digits);
        mls_buffer_put(b, digits, sizeof digits);
    }
    mls_buffer_text(b, "\"");
}

/* [[0,4],["flat",2]] */
static void put_layout(mls_buffer *b, const mls_layout *layout)
{
    mls_buffer_text(b, ",\"layout\":[");
    for (int i = 0; i < layout->count; i++) {
        mls_buffer_text(b, i == 0 ? "[" : ",[");
        if (layout->steps[i].axis == MLS_LAYOUT_FLAT) {
            mls_buffer_text(b, "\"flat\"");
        } else {
            mls_buffer_number(b, (uint64_t)layout->steps[i].axis);
        }
        put_number(b, ",", layout->steps[i].parts);
        mls_buffer_text(b, "]");
    }
    mls_buffer_text(b, "]");
}

/* Without the place: what a shard is does not change when it is moved.  What is at its
 * default (no state, the parameter's axes, no tier) is left out, so that there is one way
 * to say it. */
void mls_index_put_shard(mls_buffer *b, const mls_index_shard *s)
{
    put_plain(b, "{\"section\":", mls_section_name(s->id.section));
    put_string(b, ",\"name\":", s->id.name);
    if (s->id.has_state) {
        put_string(b, ",\"state\":", s->id.state);
    }
    put_plain(b, ",\"dtype\":", mls_dtype_of(s->dtype)->file_name);
    mls_buffer_text(b, ",\"shape\":[");
    for (int i = 0; i < s->rank; i++) {
        put_number(b, i == 0 ? "" : ",", s->shape[i]);
    }
    mls_buffer_text(b, "]");
    put_layout(b, &s->layout);
    put_number(b, ",\"part\":", s->part);
    for (int i = 0; s->axes != NULL && i < s->rank; i++) {
        mls_buffer_text(b, i == 0 ? ",\"axes\":[" : ",");
        if (s->axes[i] == MLS_NO_AXIS) {
            mls_buffer_text(b, "null");
        } else {
            mls_buffer_number(b, (uint64_t)s->axes[i]);
        }
        mls_buffer_text(b, i == s->rank - 1 ? "]" : "");
    }
    if (s->tier != MLS_TIER_NONE) {
        put_plain(b, ",\"tier\":", mls_tier_name(s->tier));
    }
    put_number(b, ",\"version\":", s->version);
}

/* The lengths of coded frames: one string, as rows are. */
static void put_frames(mls_buffer *b, const mls_frames *frames)
{
    const size_t count = mls_frames_count(frames->bytes);
    put_plain(b, ",\"codec\":", mls_codec_name(frames->codec));
    for (size_t i = 0; i < count; i++) {
        put_number(b, i == 0 ? ",\"frames\":\"" : ",",
                   frames->ends[i] - mls_frame_begin(frames, i));
    }
    mls_buffer_text(b, "\"");
}

/* Rows are numbers of rows, so that lists are short: how many are passed over, how many
 * follow that are held, and so on.  Rows behind the last run are not said.  One string
 * has them all: there may be thousands, and an array of as many values is slow to read.
 */
static void put_rows(mls_buffer *b, const mls_layer *layer)
{
    size_t end = 0; /* of the run before */
    put_number(b, ",\"row\":", layer->row);
    for (size_t i = 0; i < layer->run_count; i++) {
        const mls_extent *run = &layer->runs[i];
        /* the shard's last row may be short, and only a last run has it */
        const size_t rows =
            run->count / layer->row + (run->count % layer->row != 0 ? 1 : 0);
        put_number(b, i == 0 ? ",\"rows\":\"" : ",", (run->begin - end) / layer->row);
        put_number(b, ",", rows);
        end = run->begin + run->count;
    }
    mls_buffer_text(b, "\"");
}

/* A full layer says nothing of rows, one that is not coded nothing of frames. */
void mls_index_put_layer(mls_buffer *b, const mls_layer *layer)
{
    if (layer->row != 0) {
        put_rows(b, layer);
    }
    if (layer->frames != NULL) {
        put_frames(b, layer->frames);
    }
}

/* A run of stored bytes: where it is, and its checksums.  One of a single block says its
 * checksum once. */
static void put_place(mls_buffer *b, const char *first_key, const mls_layer *place)
{
    const size_t blocks = mls_safetensors_blocks(place->bytes);
    put_number(b, first_key, place->file);
    put_number(b, ",\"offset\":", place->offset);
    put_number(b, ",\"bytes\":", place->bytes);
    put_crcs(b, ",\"crc32c\":", &place->crc, 1);
    if (blocks > 1) {
        put_crcs(b, ",\"blocks\":", place->crcs, blocks);
    }
}

/* What follows in an index: its place, or its layers. */
static void put_places(mls_buffer *b, const mls_index_shard *s)
{
    if (s->layers == NULL) {
        const mls_layer whole = {.file = s->file,
                                 .offset = s->offset,
                                 .bytes = s->bytes,
                                 .crc = s->crc,
                                 .crcs = s->crcs};
        put_place(b, ",\"file\":", &whole);
        mls_buffer_text(b, "}");
        return;
    }
    mls_buffer_text(b, ",\"layers\":[");
    for (size_t i = 0; i < s->layers->count; i++) {
        put_place(b, i == 0 ? "{\"file\":" : ",{\"file\":", &s->layers->list[i]);
        mls_index_put_layer(b, &s->layers->list[i]);
        mls_buffer_text(b, "}");
    }
    mls_buffer_text(b, "]}");
}

/* The lowest version that can say it: an index without sparse shards is for every reader
 * what it always was. */
static uint64_t version_of(const mls_index *index)
{
    for (size_t i = 0; i < index->shard_count; i++) {
        if (index->shards[i].layers != NULL) {
            return MLS_INDEX_SPARSE;
        }
    }
    return MLS_INDEX_VERSION;
}

/* One line for each file and each shard: people look at these, and so do tools that
 * compare lines.  Whether there was room is asked once, at the end: a buffer that failed
 * takes no more.  The seal comes last, over all that was written; the checksum of the
 * whole, digits of the seal included, is what a manifest records of its indexes. */
mls_code mls_index_build(const mls_index *index, const mls_crc_kernels *crc,
                         mls_buffer *out, uint32_t *crc_out, mls_status *st)
{
    mls_buffer *b = out;
    b->most = TEXT_MOST;
    put_number(b, MLS_SEAL_START ",\n\"format\":\"mlstate.index\",\"format_version\":",
               version_of(index));
    put_plain(b, ",\n\"generation\":", index->generation);
    put_number(b, ",\"rank\":", index->rank);
    put_number(b, ",\"world_size\":", index->world_size);
    mls_buffer_text(b, ",\n\"files\":[");
    for (size_t i = 0; i < index->file_count; i++) {
        const mls_index_file *file = &index->files[i];
        put_plain(b, i == 0 ? "\n{\"path\":" : ",\n{\"path\":", file->path);
        put_number(b, ",\"bytes\":", file->bytes);
        put_crcs(b, ",\"header_crc32c\":", &file->header_crc, 1);
        mls_buffer_text(b, "}");
    }
    mls_buffer_text(b, "],\n\"shards\":[");
    for (size_t i = 0; i < index->shard_count; i++) {
        mls_buffer_text(b, i == 0 ? "\n" : ",\n");
        mls_index_put_shard(b, &index->shards[i]);
        put_places(b, &index->shards[i]);
    }
    mls_buffer_text(b, "]}\n");
    if (b->code != MLS_OK) {
        return mls_fail(st, b->code, "no room for an index of %zu shards",
                        index->shard_count);
    }
    mls_seal(b->data, b->length, crc);
    *crc_out = crc->update(0, b->data, b->length);
    return MLS_OK;
}
