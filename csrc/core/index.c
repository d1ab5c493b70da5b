/* index: reading.
 *
 * The reader goes over the document twice: once to check its outline and to count what
 * will be needed, once to fill it in.  Each count is a number of JSON values, so memory
 * stays in proportion to the text.  Whatever is wrong with a shard is said with its name.
 */
#include "index.h"

#include "mem.h"
#include "safetensors.h"
#include "seal.h"
#include "size.h"

#include <stdlib.h>
#include <string.h>

enum {
    DEPTH = 8,           /* an index needs 5 */
    NODES = 64 << 20,    /* values in a text of 512 MiB, and more than it can hold */
    SHOWN_NAME = 100,    /* bytes of a name in a message */
    HEADER_BYTES = 8,    /* a shard file has no payload before that */
    WORLD_MOST = 1 << 24 /* ranks */
};

/* Also the names of the folders that the files of a section are in. */
const char *mls_section_name(mls_section section)
{
    static const char *const names[MLS_SECTION_COUNT] = {
        [MLS_PARAMS] = "params", [MLS_OPTIM_STATE] = "optim_state"};
    return names[section];
}

/* The first has no name: a shard that states no tier has no such member. */
const char *mls_tier_name(mls_tier tier)
{
    static const char *const names[MLS_TIER_COUNT] = {[MLS_TIER_NONE] = "",
                                                      [MLS_TIER_HOT] = "hot",
                                                      [MLS_TIER_WARM] = "warm",
                                                      [MLS_TIER_COLD] = "cold"};
    return names[tier];
}

/* Names are compared as bytes, never by locale: the order is part of the format, and two
 * machines must agree on it. */
int mls_tensor_id_compare(const mls_tensor_id *a, const mls_tensor_id *b)
{
    if (a->section != b->section) {
        return a->section < b->section ? -1 : 1;
    }
    const int names = mls_text_compare(a->name, b->name);
    if (names != 0) {
        return names;
    }
    if (a->has_state != b->has_state) {
        return a->has_state ? 1 : -1;
    }
    return a->has_state ? mls_text_compare(a->state, b->state) : 0;
}

/* Parts of one tensor follow one another. */
int mls_index_compare(const mls_index_shard *a, const mls_index_shard *b)
{
    const int ids = mls_tensor_id_compare(&a->id, &b->id);
    return ids != 0 ? ids : a->part < b->part ? -1 : a->part > b->part;
}

/* Dimensions of 0 count as 1: NumPy and torch multiply the others all the same. */
bool mls_index_fits(mls_dtype dtype, int rank, const size_t *shape)
{
    size_t bytes = mls_dtype_of(dtype)->item_bytes;
    for (int axis = 0; axis < rank; axis++) {
        if (!mls_size_mul(bytes, shape[axis] == 0 ? 1 : shape[axis], &bytes)) {
            return false;
        }
    }
    return bytes <= PTRDIFF_MAX;
}

/* Axes and tier may differ: they do not say what the bytes are. */
bool mls_index_same_tensor(const mls_index_shard *a, const mls_index_shard *b)
{
    bool same =
        a->dtype == b->dtype && a->rank == b->rank && a->layout.count == b->layout.count;
    for (int i = 0; same && i < a->rank; i++) {
        same = a->shape[i] == b->shape[i];
    }
    for (int i = 0; same && i < a->layout.count; i++) {
        same = a->layout.steps[i].axis == b->layout.steps[i].axis &&
               a->layout.steps[i].parts == b->layout.steps[i].parts;
    }
    return same;
}

/* Made anew for each who asks: a part takes 300 bytes, and an index has many. */
mls_part mls_index_part(const mls_index_shard *shard)
{
    mls_part part = {0};
    mls_status ignored;
    /* it was made once already, when the index was */
    (void)mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part, &part,
                          &ignored);
    return part;
}

/* Names lie in the document, which goes last. */
void mls_index_fini(mls_index *index)
{
    mls_free(index->files);
    mls_free(index->shards);
    mls_free(index->dims);
    mls_free(index->axes);
    mls_free(index->crcs);
    mls_free(index->sparse);
    mls_free(index->layers);
    mls_free(index->extents);
    mls_json_free(index->json);
    *index = (mls_index){0};
}

/* ---- reading: what can be asked of any value ---- */

typedef struct reader {
    const mls_json *json;
    mls_index index;                        /* its counts are final, its arrays grow */
    size_t dims_used, axes_used, crcs_used; /* of what was counted beforehand */
    mls_text name;                          /* of the present shard, for messages */
    mls_status *st;
} reader;

/* "shard of 'x': 'key' what", at the value's place. */
static mls_code fail_member(reader *r, mls_json_node node, const char *key,
                            const char *what)
{
    const size_t at = node == MLS_JSON_NONE ? 0 : mls_json_offset(r->json, node);
    if (r->name.data == NULL) {
        return mls_fail_at(r->st, at, "\"%s\" %s", key, what);
    }
    const int shown = (int)(r->name.length < SHOWN_NAME ? r->name.length : SHOWN_NAME);
    mls_fail_at(r->st, at, "shard of '%.*s': \"%s\" %s", shown, r->name.data, key, what);
    mls_status_name(r->st, r->name.data, r->name.length);
    return MLS_E_FORMAT;
}

typedef mls_json_member member; /* one that an object may have */

/* Such a member before it was looked for. */
#define MEMBER(name, kind, must)                                                         \
    {.key = (name), .length = sizeof(name) - 1, .needed = (must), .type = (kind)}

/* "is not of that type" in words. */
static const char *wrong_type(mls_json_type type)
{
    switch (type) {
    case MLS_JSON_STRING:
        return "is not a string";
    case MLS_JSON_ARRAY:
        return "is not an array";
    default:
        return "is not a number";
    }
}

/* A member that is needed and not there, or not of its type. */
static mls_code refuse_member(reader *r, mls_json_node object, const member *m)
{
    return m->node == MLS_JSON_NONE
               ? fail_member(r, object, m->key, "is missing")
               : fail_member(r, m->node, m->key, wrong_type(m->type));
}

/* Find the members of an object and see that they have the right types.  Members that are
 * not in the table are left alone: later versions may have more. */
static mls_code find_members(reader *r, mls_json_node object, member *table, size_t count)
{
    const size_t bad = mls_json_members(r->json, object, table, count);
    return bad == count ? MLS_OK : refuse_member(r, object, &table[bad]);
}

/* A whole number from `least` to `most`. */
static mls_code read_number(reader *r, const member *m, uint64_t least, uint64_t most,
                            uint64_t *out)
{
    uint64_t value;
    if (!mls_json_u64(r->json, m->node, &value) || value < least || value > most) {
        fail_member(r, m->node, m->key, "is no whole number in its range");
        mls_status_expected(r->st, "%llu to %llu", (unsigned long long)least,
                            (unsigned long long)most);
        return MLS_E_FORMAT;
    }
    *out = value;
    return MLS_OK;
}

/* As read_number, for what must fit the address space. */
static mls_code read_size(reader *r, const member *m, size_t most, size_t *out)
{
    uint64_t value;
    const mls_code code = read_number(r, m, 0, most, &value);
    if (code == MLS_OK) {
        *out = (size_t)value;
    }
    return code;
}

/* Exactly eight digits, in the writer's own form: anything else was not written by one.
 */
static mls_code read_crc(reader *r, const member *m, uint32_t *out)
{
    const mls_text text = mls_json_text(r->json, m->node);
    return text.length == MLS_CRC_DIGITS && mls_crc_from_digits(text.data, out)
               ? MLS_OK
               : fail_member(r, m->node, m->key, "is not 8 hexadecimal digits");
}

/* ---- reading: files ---- */

/* Characters of our own file names (filename.h), so that no path leads anywhere else. */
static bool plain_name(mls_text text)
{
    for (size_t i = 0; i < text.length; i++) {
        const char c = text.data[i];
        if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
              c == '=' || c == '~' || c == '.')) {
            return false;
        }
    }
    return text.length > 0 && text.data[0] != '.';
}

/* "params/x.safetensors".  One folder and one file, so that whoever opens or deletes what
 * an index names stays inside the pool, whoever wrote the index. */
static bool good_path(mls_text path)
{
    static const char suffix[] = ".safetensors";
    const size_t suffix_length = sizeof suffix - 1;
    for (int s = 0; s < MLS_SECTION_COUNT; s++) {
        const char *folder = mls_section_name((mls_section)s);
        const size_t start = strlen(folder) + 1;
        if (path.length > start + suffix_length && path.length <= MLS_PATH_BYTES &&
            memcmp(path.data, folder, start - 1) == 0 && path.data[start - 1] == '/') {
            const mls_text name = {path.data + start, path.length - start};
            return plain_name(name) && memcmp(path.data + path.length - suffix_length,
                                              suffix, suffix_length) == 0;
        }
    }
    return false;
}

/* One of the files, which shards name by its number.  No file is shorter than the length
 * that each starts with. */
static mls_code read_file(reader *r, mls_json_node node, mls_index_file *file)
{
    enum { PATH, BYTES, HEADER_CRC, COUNT };
    member m[COUNT] = {[PATH] = MEMBER("path", MLS_JSON_STRING, true),
                       [BYTES] = MEMBER("bytes", MLS_JSON_NUMBER, true),
                       [HEADER_CRC] = MEMBER("header_crc32c", MLS_JSON_STRING, true)};
    mls_code code = find_members(r, node, m, COUNT);
    if (code != MLS_OK) {
        return code;
    }
    const mls_text path = mls_json_text(r->json, m[PATH].node);
    if (!good_path(path)) {
        return fail_member(r, m[PATH].node, "path", "is not that of a shard file");
    }
    memcpy(file->path, path.data, path.length);
    code = read_number(r, &m[BYTES], HEADER_BYTES, INT64_MAX, &file->bytes);
    return code == MLS_OK ? read_crc(r, &m[HEADER_CRC], &file->header_crc) : code;
}

/* ---- reading: shards ---- */

enum {
    SECTION,
    NAME,
    STATE,
    DTYPE,
    SHAPE,
    LAYOUT,
    PART,
    AXES,
    TIER,
    VERSION,
    FILE_NUMBER,
    OFFSET,
    BYTES,
    CRC,
    BLOCKS,
    MEMBERS
};

static const member shard_members[MEMBERS] = {
    [SECTION] = MEMBER("section", MLS_JSON_STRING, true),
    [NAME] = MEMBER("name", MLS_JSON_STRING, true),
    [STATE] = MEMBER("state", MLS_JSON_STRING, false),
    [DTYPE] = MEMBER("dtype", MLS_JSON_STRING, true),
    [SHAPE] = MEMBER("shape", MLS_JSON_ARRAY, true),
    [LAYOUT] = MEMBER("layout", MLS_JSON_ARRAY, true),
    [PART] = MEMBER("part", MLS_JSON_NUMBER, true),
    [AXES] = MEMBER("axes", MLS_JSON_ARRAY, false),
    [TIER] = MEMBER("tier", MLS_JSON_STRING, false),
    [VERSION] = MEMBER("version", MLS_JSON_NUMBER, true),
    [FILE_NUMBER] = MEMBER("file", MLS_JSON_NUMBER, true),
    [OFFSET] = MEMBER("offset", MLS_JSON_NUMBER, true),
    [BYTES] = MEMBER("bytes", MLS_JSON_NUMBER, true),
    [CRC] = MEMBER("crc32c", MLS_JSON_STRING, true),
    [BLOCKS] = MEMBER("blocks", MLS_JSON_STRING, false),
};

/* The name of a text among `count` names, or `count`. */
static int which_name(mls_text text, const char *(*name_of)(int), int count)
{
    int i = 0;
    while (i < count && !mls_text_is(text, name_of(i))) {
        i++;
    }
    return i;
}

/* For which_name, which knows no enum by name; so is the next. */
static const char *section_of(int i)
{
    return mls_section_name((mls_section)i);
}

/* Among the names is the empty one, of no tier: whoever asks refuses it himself. */
static const char *tier_of(int i)
{
    return mls_tier_name((mls_tier)i);
}

/* Dots divide parameter and state: where both are joined, they must come apart again. */
static mls_code read_id(reader *r, const member *m, mls_tensor_id *id)
{
    const mls_text section = mls_json_text(r->json, m[SECTION].node);
    const int which = which_name(section, section_of, MLS_SECTION_COUNT);
    if (which == MLS_SECTION_COUNT) {
        return fail_member(r, m[SECTION].node, "section",
                           "is neither \"params\" nor \"optim_state\"");
    }
    *id = (mls_tensor_id){.section = (mls_section)which,
                          .name = mls_json_text(r->json, m[NAME].node),
                          .has_state = m[STATE].node != MLS_JSON_NONE};
    if (id->section == MLS_PARAMS) {
        return id->has_state
                   ? fail_member(r, m[STATE].node, "state", "in the section \"params\"")
                   : MLS_OK;
    }
    /* what stands behind the last dot of the key in a file */
    const mls_text divided =
        id->has_state ? mls_json_text(r->json, m[STATE].node) : id->name;
    if (divided.length > 0 && memchr(divided.data, '.', divided.length) != NULL) {
        return fail_member(r, m[id->has_state ? STATE : NAME].node,
                           id->has_state ? "state" : "name", "has a dot");
    }
    if (id->has_state) {
        id->state = divided;
    }
    return MLS_OK;
}

/* Dimensions go to the index's array of all of them, where room for as many as the text
 * has was made. */
static mls_code read_shape(reader *r, const member *m, mls_index_shard *shard)
{
    size_t *dims = r->index.dims + r->dims_used;
    const size_t rank = mls_json_size(r->json, m->node);
    if (rank > MLS_LAYOUT_RANK) {
        return fail_member(r, m->node, m->key, "has too many dimensions");
    }
    mls_json_node node = mls_json_first(r->json, m->node);
    for (size_t i = 0; i < rank; i++, node = mls_json_next(r->json, node)) {
        uint64_t dim;
        if (!mls_json_u64(r->json, node, &dim) || !mls_size_from_u64(dim, &dims[i])) {
            return fail_member(r, node, m->key, "has a dimension that is no size");
        }
    }
    shard->rank = (int)rank;
    shard->shape = dims;
    r->dims_used += rank;
    return MLS_OK;
}

/* [axis or "flat", parts]: the only arrays of two kinds of values in the format. */
static bool read_step(reader *r, mls_json_node node, mls_layout_step *step)
{
    uint64_t axis, parts;
    const mls_json_node first = mls_json_first(r->json, node);
    if (mls_json_type_of(r->json, node) != MLS_JSON_ARRAY ||
        mls_json_size(r->json, node) != 2 ||
        !mls_json_u64(r->json, mls_json_next(r->json, first), &parts) ||
        !mls_size_from_u64(parts, &step->parts)) {
        return false;
    }
    if (mls_json_type_of(r->json, first) == MLS_JSON_STRING) {
        step->axis = MLS_LAYOUT_FLAT;
        return mls_text_is(mls_json_text(r->json, first), "flat");
    }
    if (!mls_json_u64(r->json, first, &axis) || axis >= MLS_LAYOUT_RANK) {
        return false;
    }
    step->axis = (int)axis;
    return true;
}

/* Whether the steps make sense together, and with the shape, is asked later, when the
 * part is made of them. */
static mls_code read_layout(reader *r, const member *m, mls_layout *layout)
{
    if (mls_json_size(r->json, m->node) > MLS_LAYOUT_STEPS) {
        return fail_member(r, m->node, m->key, "has too many steps");
    }
    for (mls_json_node node = mls_json_first(r->json, m->node); node != MLS_JSON_NONE;
         node = mls_json_next(r->json, node)) {
        if (!read_step(r, node, &layout->steps[layout->count])) {
            return fail_member(r, node, m->key,
                               "has a step that is not [axis or \"flat\", parts]");
        }
        layout->count++;
    }
    return MLS_OK;
}

/* For each of the state's axes the parameter's, or null.  The parameter itself may be in
 * another index, or nowhere: what is said here is only used to cut. */
static mls_code read_axes(reader *r, const member *m, mls_index_shard *shard)
{
    signed char *axes = r->index.axes + r->axes_used;
    if (m->node == MLS_JSON_NONE) {
        return MLS_OK;
    }
    if (mls_json_size(r->json, m->node) != (size_t)shard->rank) {
        return fail_member(r, m->node, m->key, "are not as many as the shape has");
    }
    mls_json_node node = mls_json_first(r->json, m->node);
    for (int i = 0; i < shard->rank; i++, node = mls_json_next(r->json, node)) {
        uint64_t axis;
        if (mls_json_type_of(r->json, node) == MLS_JSON_NULL) {
            axes[i] = MLS_NO_AXIS;
        } else if (mls_json_u64(r->json, node, &axis) && axis < MLS_LAYOUT_RANK) {
            axes[i] = (signed char)axis;
        } else {
            return fail_member(r, node, m->key, "hold neither an axis nor null");
        }
    }
    shard->axes = axes;
    r->axes_used += (size_t)shard->rank;
    return MLS_OK;
}

/* Not stated is no tier; stated wrongly is an error, since nobody could tell what was
 * meant. */
static mls_code read_tier(reader *r, const member *m, mls_tier *tier)
{
    if (m->node == MLS_JSON_NONE) {
        return MLS_OK;
    }
    const int which =
        which_name(mls_json_text(r->json, m->node), tier_of, MLS_TIER_COUNT);
    if (which == MLS_TIER_NONE || which == MLS_TIER_COUNT) {
        return fail_member(r, m->node, m->key, "is none of \"hot\", \"warm\", \"cold\"");
    }
    *tier = (mls_tier)which;
    return MLS_OK;
}

/* What the shard is, by layout and shape, and that its bytes are those of that.  Nothing
 * but this ties the three to each other; the reader of files relies on it for every
 * address that it computes. */
static mls_code check_part(reader *r, const member *m, const mls_index_shard *shard)
{
    mls_part part;
    mls_status why;
    size_t bytes;
    if (!mls_index_fits(shard->dtype, shard->rank, shard->shape)) {
        return fail_member(r, m[SHAPE].node, "shape", "is larger than any memory");
    }
    if (mls_layout_part(&shard->layout, shard->rank, shard->shape, shard->part, &part,
                        &why) != MLS_OK) {
        return fail_member(r, m[LAYOUT].node, "layout",
                           why.code == MLS_E_VALUE
                               ? "does not have this part, or no sense"
                               : "does not fit the shape");
    }
    if (!mls_size_mul(mls_part_count(&part), mls_dtype_of(shard->dtype)->item_bytes,
                      &bytes) ||
        bytes != shard->bytes) {
        return fail_member(r, m[BYTES].node, "bytes",
                           "are not as many as shape, layout and dtype make");
    }
    return MLS_OK;
}

/* One checksum a block; a shard of one block has but the one.  That of the whole shard is
 * not compared with those of its blocks: whoever verifies reads the blocks. */
static mls_code read_blocks(reader *r, const member *m, mls_index_shard *shard)
{
    const size_t count = mls_safetensors_blocks(shard->bytes);
    uint32_t *crcs = r->index.crcs + r->crcs_used;
    mls_code code = read_crc(r, &m[CRC], &shard->crc);
    if (code != MLS_OK) {
        return code;
    }
    if ((m[BLOCKS].node == MLS_JSON_NONE) != (count <= 1)) {
        return fail_member(r, m[count <= 1 ? BLOCKS : CRC].node, "blocks",
                           count <= 1 ? "of a shard that is no longer than one"
                                      : "is missing");
    }
    shard->crcs = crcs;
    r->crcs_used += count;
    if (count <= 1) {
        crcs[0] = shard->crc; /* room for it was counted, by "crc32c" */
        r->crcs_used = (size_t)(crcs - r->index.crcs) + 1;
        return shard->bytes > 0 || shard->crc == 0
                   ? MLS_OK
                   : fail_member(r, m[CRC].node, "crc32c", "is not that of no bytes");
    }
    const mls_text digits = mls_json_text(r->json, m[BLOCKS].node);
    if (digits.length % MLS_CRC_DIGITS != 0 || digits.length / MLS_CRC_DIGITS != count) {
        return fail_member(r, m[BLOCKS].node, "blocks",
                           "are not 8 digits for each MiB of the shard");
    }
    for (size_t i = 0; i < count; i++) {
        if (!mls_crc_from_digits(digits.data + i * MLS_CRC_DIGITS, &crcs[i])) {
            return fail_member(r, m[BLOCKS].node, "blocks", "are not hexadecimal");
        }
    }
    return MLS_OK;
}

/* Where it lies: inside its file, as far as the file's recorded length tells.  Whether
 * the file has that length is seen when it is opened. */
static mls_code read_place(reader *r, const member *m, mls_index_shard *shard)
{
    uint64_t end;
    mls_code code = read_size(r, &m[BYTES], SIZE_MAX, &shard->bytes);
    if (code == MLS_OK) {
        code = read_number(r, &m[OFFSET], HEADER_BYTES, INT64_MAX, &shard->offset);
    }
    if (code == MLS_OK) {
        code = read_size(r, &m[FILE_NUMBER], SIZE_MAX, &shard->file);
    }
    if (code != MLS_OK) {
        return code;
    }
    if (shard->file >= r->index.file_count) {
        return fail_member(r, m[FILE_NUMBER].node, "file", "is not one of the files");
    }
    if (!mls_u64_add(shard->offset, shard->bytes, &end) ||
        end > r->index.files[shard->file].bytes) {
        return fail_member(r, m[OFFSET].node, "offset",
                           "and bytes lead behind the end of the file");
    }
    return MLS_OK;
}

/* Everything that a shard says of itself.
 *
 * Member by member, each on the shoulders of those before: the shape before the layout
 * that cuts it, both before the bytes that must fit them, the bytes before the checksums
 * that cover them. */
static mls_code read_shard(reader *r, mls_json_node node, member *m,
                           mls_index_shard *shard)
{
    mls_code code = MLS_OK;
    const size_t bad = mls_json_members(r->json, node, m, MEMBERS);
    /* known first, so that whatever is wrong can be said with it */
    r->name = m[NAME].node == MLS_JSON_NONE ? (mls_text){0}
                                            : mls_json_text(r->json, m[NAME].node);
    if (bad < MEMBERS) {
        return refuse_member(r, node, &m[bad]);
    }
    const mls_text dtype = mls_json_text(r->json, m[DTYPE].node);
    if (!mls_dtype_from_file_name(dtype.data, dtype.length, &shard->dtype)) {
        return fail_member(r, m[DTYPE].node, "dtype", "is unknown");
    }
    if ((code = read_id(r, m, &shard->id)) != MLS_OK ||
        (code = read_shape(r, &m[SHAPE], shard)) != MLS_OK ||
        (code = read_layout(r, &m[LAYOUT], &shard->layout)) != MLS_OK ||
        (code = read_axes(r, &m[AXES], shard)) != MLS_OK ||
        (code = read_tier(r, &m[TIER], &shard->tier)) != MLS_OK ||
        (code = read_number(r, &m[VERSION], 1, INT64_MAX, &shard->version)) != MLS_OK ||
        (code = read_size(r, &m[PART], PTRDIFF_MAX, &shard->part)) != MLS_OK ||
        (code = read_place(r, m, shard)) != MLS_OK ||
        (code = check_part(r, m, shard)) != MLS_OK) {
        return code;
    }
    return read_blocks(r, m, shard);
}

/* ---- reading: the whole ---- */

/* How much the shards will need of each array: counted generously, from values and
 * digits that really are in the text. */
static mls_code count_needs(reader *r, mls_json_node shards, size_t *dims, size_t *axes,
                            size_t *crcs)
{
    enum { DIMS, AXIS, CRCS, COUNT };
    member m[COUNT] = {[DIMS] = MEMBER("shape", MLS_JSON_ARRAY, false),
                       [AXIS] = MEMBER("axes", MLS_JSON_ARRAY, false),
                       [CRCS] = MEMBER("blocks", MLS_JSON_STRING, false)};
    for (mls_json_node node = mls_json_first(r->json, shards); node != MLS_JSON_NONE;
         node = mls_json_next(r->json, node)) {
        if (mls_json_type_of(r->json, node) != MLS_JSON_OBJECT) {
            return fail_member(r, node, "shards", "hold what is no object");
        }
        (void)mls_json_members(r->json, node, m, COUNT); /* types are asked later */
        *dims += m[DIMS].node == MLS_JSON_NONE ? 0 : mls_json_size(r->json, m[DIMS].node);
        *axes += m[AXIS].node == MLS_JSON_NONE ? 0 : mls_json_size(r->json, m[AXIS].node);
        *crcs += 1;
        if (m[CRCS].node != MLS_JSON_NONE) {
            *crcs += mls_json_text(r->json, m[CRCS].node).length / MLS_CRC_DIGITS;
        }
    }
    return MLS_OK;
}

/* All arrays at once: their addresses must not change any more, since shards point into
 * them as soon as they are read. */
static mls_code allocate(reader *r, mls_json_node files, mls_json_node shards)
{
    mls_index *x = &r->index;
    size_t dims = 0, axes = 0, crcs = 0;
    const mls_code code = count_needs(r, shards, &dims, &axes, &crcs);
    if (code != MLS_OK) {
        return code;
    }
    x->file_count = mls_json_size(r->json, files);
    x->shard_count = mls_json_size(r->json, shards);
    if ((x->files = mls_alloc(x->file_count, sizeof *x->files)) == NULL ||
        (x->shards = mls_alloc(x->shard_count, sizeof *x->shards)) == NULL ||
        (x->dims = mls_alloc(dims, sizeof *x->dims)) == NULL ||
        (x->axes = mls_alloc(axes, sizeof *x->axes)) == NULL ||
        (x->crcs = mls_alloc(crcs, sizeof *x->crcs)) == NULL) {
        return mls_fail(r->st, MLS_E_MEMORY, "no memory for an index of %zu shards",
                        x->shard_count);
    }
    return MLS_OK;
}

/* qsort, for what mostly is in order: then nothing is moved, and no memory is taken.
 * False: no two are equal.  True: some may be. */
static bool sort(void *base, size_t count, size_t size,
                 int (*compare)(const void *, const void *))
{
    const char *at = base;
    bool twins = false;
    for (size_t i = 1; i < count; i++, at += size) {
        const int order = compare(at, at + size);
        if (order > 0) {
            qsort(base, count, size, compare);
            return true;
        }
        twins = twins || order == 0;
    }
    return twins;
}

/* For sort. */
static int compare_shards(const void *a, const void *b)
{
    return mls_index_compare(a, b);
}

/* Ours are sorted already; others' may not be.  Then equal ones are neighbours. */
static mls_code sort_shards(reader *r)
{
    const mls_index *x = &r->index;
    const bool twins = sort(x->shards, x->shard_count, sizeof *x->shards, compare_shards);
    for (size_t i = 1; twins && i < x->shard_count; i++) {
        if (mls_index_compare(&x->shards[i - 1], &x->shards[i]) == 0) {
            r->name = x->shards[i].id.name;
            return fail_member(r, MLS_JSON_NONE, "part", "appears twice");
        }
    }
    return MLS_OK;
}

/* For sort, over pointers to files. */
static int compare_paths(const void *a, const void *b)
{
    const mls_index_file *x = *(const mls_index_file *const *)a;
    const mls_index_file *y = *(const mls_index_file *const *)b;
    return strcmp(x->path, y->path);
}

/* For sort, over pointers to shards: as they lie in their files. */
static int compare_places(const void *a, const void *b)
{
    const mls_index_shard *x = *(const mls_index_shard *const *)a;
    const mls_index_shard *y = *(const mls_index_shard *const *)b;
    return x->file != y->file       ? (x->file < y->file ? -1 : 1)
           : x->offset != y->offset ? (x->offset < y->offset ? -1 : 1)
                                    : 0;
}

/* No file is listed twice. */
static mls_code check_files(reader *r, const void **sorted)
{
    const mls_index *x = &r->index;
    for (size_t i = 0; i < x->file_count; i++) {
        sorted[i] = &x->files[i];
    }
    const bool twins = sort(sorted, x->file_count, sizeof *sorted, compare_paths);
    for (size_t i = 1; twins && i < x->file_count; i++) {
        const mls_index_file *file = sorted[i];
        if (compare_paths(&sorted[i - 1], &sorted[i]) == 0) {
            r->name = (mls_text){0};
            fail_member(r, MLS_JSON_NONE, "path", "appears twice among the files");
            mls_status_got(r->st, "%.*s", SHOWN_NAME, file->path);
            return MLS_E_FORMAT;
        }
    }
    return MLS_OK;
}

/* No byte belongs to two shards: so all that is loaded from an index is no larger than
 * its files. */
static mls_code check_overlaps(reader *r, const void **sorted)
{
    const mls_index *x = &r->index;
    size_t count = 0;
    for (size_t i = 0; i < x->shard_count; i++) {
        if (x->shards[i].bytes > 0) {
            sorted[count++] = &x->shards[i];
        }
    }
    (void)sort(sorted, count, sizeof *sorted, compare_places);
    for (size_t i = 1; i < count; i++) {
        const mls_index_shard *before = sorted[i - 1], *shard = sorted[i];
        if (before->file == shard->file &&
            shard->offset - before->offset < before->bytes) {
            r->name = shard->id.name;
            return fail_member(r, MLS_JSON_NONE, "offset",
                               "is inside another shard of the file");
        }
    }
    return MLS_OK;
}

/* What only shows when all of them are known. */
static mls_code check_places(reader *r)
{
    const mls_index *x = &r->index;
    const size_t most = x->file_count > x->shard_count ? x->file_count : x->shard_count;
    const void **sorted = mls_alloc(most, sizeof *sorted);
    if (sorted == NULL) {
        return mls_fail(r->st, MLS_E_MEMORY, "no memory for an index of %zu shards",
                        x->shard_count);
    }
    mls_code code = check_files(r, sorted);
    if (code == MLS_OK) {
        code = check_overlaps(r, sorted);
    }
    mls_free(sorted);
    return code;
}

/* Whether it is an index, and of a version that is understood: asked before anything
 * else, since what a later version has besides, or lacks, is not known. */
static mls_code read_format(reader *r)
{
    enum { FORMAT, FORMAT_NUMBER, COUNT };
    member m[COUNT] = {[FORMAT] = MEMBER("format", MLS_JSON_STRING, true),
                       [FORMAT_NUMBER] = MEMBER("format_version", MLS_JSON_NUMBER, true)};
    uint64_t number;
    const mls_code code = find_members(r, 0, m, COUNT);
    if (code != MLS_OK) {
        return code;
    }
    if (!mls_text_is(mls_json_text(r->json, m[FORMAT].node), "mlstate.index")) {
        return fail_member(r, m[FORMAT].node, "format", "is not \"mlstate.index\"");
    }
    if (!mls_json_u64(r->json, m[FORMAT_NUMBER].node, &number) ||
        number != MLS_INDEX_VERSION) {
        fail_member(r, m[FORMAT_NUMBER].node, "format_version",
                    "is one that this mlstate does not read: use a newer one");
        mls_status_expected(r->st, "%d", (int)MLS_INDEX_VERSION);
        return MLS_E_FORMAT;
    }
    return MLS_OK;
}

/* The members in front of the lists. */
static mls_code read_head(reader *r, const member *generation, const member *rank,
                          const member *world)
{
    const mls_text text = mls_json_text(r->json, generation->node);
    uint32_t half;
    if (text.length != MLS_GENERATION_DIGITS || !mls_crc_from_digits(text.data, &half) ||
        !mls_crc_from_digits(text.data + MLS_CRC_DIGITS, &half)) {
        return fail_member(r, generation->node, "generation",
                           "is not 16 hexadecimal digits");
    }
    memcpy(r->index.generation, text.data, text.length);
    const mls_code code = read_number(r, world, 1, WORLD_MOST, &r->index.world_size);
    return code == MLS_OK
               ? read_number(r, rank, 0, r->index.world_size - 1, &r->index.rank)
               : code;
}

/* Each file and each shard, in the order of the text. */
static mls_code read_lists(reader *r, mls_json_node files, mls_json_node shards)
{
    member m[MEMBERS];
    memcpy(m, shard_members, sizeof m);
    mls_code code = allocate(r, files, shards);
    mls_json_node node = mls_json_first(r->json, files);
    for (size_t i = 0; code == MLS_OK && i < r->index.file_count; i++) {
        code = mls_json_type_of(r->json, node) == MLS_JSON_OBJECT
                   ? read_file(r, node, &r->index.files[i])
                   : fail_member(r, node, "files", "hold what is no object");
        node = mls_json_next(r->json, node);
    }
    node = code == MLS_OK ? mls_json_first(r->json, shards) : MLS_JSON_NONE;
    for (size_t i = 0; code == MLS_OK && i < r->index.shard_count; i++) {
        code = read_shard(r, node, m, &r->index.shards[i]);
        node = mls_json_next(r->json, node);
    }
    return code;
}

/* Everything but the seal. */
static mls_code read_index(reader *r)
{
    enum { GENERATION, RANK, WORLD, FILES, SHARDS, COUNT };
    member m[COUNT] = {[GENERATION] = MEMBER("generation", MLS_JSON_STRING, true),
                       [RANK] = MEMBER("rank", MLS_JSON_NUMBER, true),
                       [WORLD] = MEMBER("world_size", MLS_JSON_NUMBER, true),
                       [FILES] = MEMBER("files", MLS_JSON_ARRAY, true),
                       [SHARDS] = MEMBER("shards", MLS_JSON_ARRAY, true)};
    mls_code code = read_format(r);
    if (code != MLS_OK || (code = find_members(r, 0, m, COUNT)) != MLS_OK ||
        (code = read_head(r, &m[GENERATION], &m[RANK], &m[WORLD])) != MLS_OK ||
        (code = read_lists(r, m[FILES].node, m[SHARDS].node)) != MLS_OK ||
        (code = sort_shards(r)) != MLS_OK) {
        return code;
    }
    return check_places(r);
}

/* The seal comes first: of a text that was damaged nothing is parsed, and whatever is
 * found wrong behind it was written so. */
mls_code mls_index_parse(const char *text, size_t length, const mls_crc_kernels *crc,
                         mls_index *out, mls_status *st)
{
    mls_json *json = NULL;
    mls_code code = mls_seal_check(text, length, crc, st);
    if (code == MLS_OK) {
        code = mls_json_parse(text, length, (mls_json_limits){DEPTH, NODES}, &json, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    reader r = {.json = json, .index = {.json = json}, .st = st};
    /* a sealed text starts with a brace, so the root is an object */
    code = read_index(&r);
    if (code != MLS_OK) {
        mls_index_fini(&r.index);
        return code;
    }
    mls_json_forget(json); /* names stay, values are not asked for any more */
    *out = r.index;
    return MLS_OK;
}
