/* Files: read safely, replaced atomically. */
#include "base/memory.h"
#include "io/file.h"
#include "support/temporary_folder.h"
#include "support/whole_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* Number of entries in the folder. */
static int entries(void)
{
    int count = 0;
    DIR *open_folder = opendir(folder);
    if (open_folder == NULL) {
        return -1;
    }
    for (struct dirent *e; (e = readdir(open_folder)) != NULL;) {
        count += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(open_folder);
    return count;
}

static const char *in_folder(char *path, const char *name)
{
    snprintf(path, PATH_ROOM, "%s/%s", folder, name);
    return path;
}

static bool content_is(const char *path, const char *expected)
{
    size_t length = 0;
    unsigned char *data = read_file(path, &length);
    const bool same =
        data != NULL && length == strlen(expected) && memcmp(data, expected, length) == 0;
    mls_free(data);
    return same;
}

static mls_code replace(const char *path, const char *text, mls_status *st)
{
    return mls_file_replace(path, 0666, text, strlen(text), st);
}

static char path[PATH_ROOM];

TEST(only_regular_files_are_opened_without_blocking)
{
    int fd = -1;
    uint64_t bytes;
    CHECK_FAILS(mls_file_open(folder, &fd, &bytes, &status), MLS_E_IO,
                "cannot read the file: Is a directory");
    CHECK(status.os_error == EISDIR);
    CHECK(mls_file_open(in_folder(path, "none"), &fd, &bytes, &status) == MLS_E_IO);
    CHECK(status.os_error == ENOENT);
    CHECK(mkfifo(in_folder(path, "fifo"), 0600) == 0);
    CHECK_FAILS(mls_file_open(path, &fd, &bytes, &status), MLS_E_FORMAT,
                "not a regular file but a FIFO, socket or device");
    CHECK_FAILS(
        replace(path, "x", &status), MLS_E_VALUE,
        "only a regular file can be replaced, not a FIFO, socket, device or link");
    CHECK(mls_file_open("/dev/null", &fd, &bytes, &status) == MLS_E_FORMAT);
    CHECK(entries() == 1);
}

TEST(read_past_the_end_is_an_error)
{
    char room[8] = "";
    int fd = -1;
    uint64_t length = 0;
    write_text(in_folder(path, "a"), "hello");
    REQUIRE(mls_file_open(path, &fd, &length, &status) == MLS_OK);
    CHECK(length == 5);
    CHECK(mls_file_read_at(fd, room, 3, 2, &status) == MLS_OK &&
          memcmp(room, "llo", 3) == 0);
    CHECK_FAILS(mls_file_read_at(fd, room, 4, 2, &status), MLS_E_FORMAT,
                "the file became shorter while it was read: 1 bytes are missing");
    CHECK(status.has_offset && status.offset == 5);
    close(fd);
    CHECK(mls_file_read_at(fd, room, 1, 0, &status) == MLS_E_IO &&
          status.os_error == EBADF);
}

TEST(new_file_is_complete_with_default_permissions)
{
    struct stat info;
    const mode_t mask = umask(027);
    CHECK(replace(in_folder(path, "new"), "text", &status) == MLS_OK);
    umask(mask);
    CHECK(content_is(path, "text"));
    CHECK(stat(path, &info) == 0 && (info.st_mode & 07777) == 0640);
    CHECK(entries() == 1);
}

TEST(replacing_keeps_permissions_and_open_readers)
{
    char seen[4] = "";
    struct stat info;
    write_text(in_folder(path, "a"), "old");
    CHECK(chmod(path, 0604) == 0);
    const int reader = open(path, O_RDONLY);
    CHECK(replace(path, "newer", &status) == MLS_OK);
    CHECK(content_is(path, "newer"));
    CHECK(stat(path, &info) == 0 && (info.st_mode & 07777) == 0604);
    CHECK(read(reader, seen, 3) == 3 && memcmp(seen, "old", 3) == 0);
    close(reader);
}

TEST(old_file_is_kept_until_commit_and_after_abort)
{
    mls_atomic_file file;
    write_text(in_folder(path, "a"), "old");
    REQUIRE(mls_atomic_begin(path, 0666, &file, &status) == MLS_OK);
    CHECK(strncmp(file.temporary, ".mlstate-", 9) == 0 && entries() == 2);
    CHECK(mls_atomic_write(&file, "new", 3, 0, &status) == MLS_OK);
    CHECK(content_is(path, "old"));
    mls_atomic_abort(&file);
    CHECK(content_is(path, "old") && entries() == 1);
}

TEST(failed_write_or_sync_removes_the_temporary_file)
{
    mls_atomic_file file;
    write_text(in_folder(path, "a"), "old");
    REQUIRE(mls_atomic_begin(path, 0666, &file, &status) == MLS_OK);
    close(file.fd); /* simulates a failing disk */
    CHECK_FAILS(mls_atomic_write(&file, "new", 3, 0, &status), MLS_E_IO,
                "cannot write 3 bytes at offset 0: Bad file descriptor");
    CHECK(status.os_error == EBADF);
    CHECK(mls_atomic_commit(&file, &status) == MLS_E_IO);
    CHECK(content_is(path, "old") && entries() == 1);
}

TEST(failed_rename_removes_the_temporary_file)
{
    mls_atomic_file file;
    in_folder(path, "a");
    REQUIRE(mls_atomic_begin(path, 0666, &file, &status) == MLS_OK);
    CHECK(mls_atomic_write(&file, "new", 3, 0, &status) == MLS_OK);
    CHECK(mkdir(path, 0700) == 0); /* another process was quicker */
    CHECK(mls_atomic_commit(&file, &status) == MLS_E_IO);
    CHECK(entries() == 1);
}

TEST(a_file_in_an_open_folder_is_replaced)
{
    char old[PATH_ROOM], link[PATH_ROOM];
    const int fd = open(folder, O_RDONLY | O_DIRECTORY);
    REQUIRE(fd >= 0 && symlink("nothing", in_folder(link, "link")) == 0);
    CHECK(mls_file_replace_at(fd, "named", 0666, "old", 3, &status) == MLS_OK);
    CHECK(mls_file_replace_at(fd, "named", 0666, "newer", 5, &status) == MLS_OK);
    CHECK(content_is(in_folder(old, "named"), "newer"));
    CHECK(mls_file_replace_at(fd, "link", 0666, "x", 1, &status) == MLS_E_VALUE);
    CHECK(mls_file_replace_at(-2, "named", 0666, "x", 1, &status) == MLS_E_IO);
    CHECK(close(fd) == 0);
}

TEST(failed_replacement_keeps_the_old_file)
{
    struct rlimit old;
    write_text(in_folder(path, "a"), "old");
    REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
    const struct rlimit small = {.rlim_cur = 2, .rlim_max = old.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK(replace(path, "new", &status) == MLS_E_IO && status.os_error == EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &old) == 0);
    signal(SIGXFSZ, handler);
    CHECK(content_is(path, "old") && entries() == 1);
}

TEST(symlink_is_followed_and_kept)
{
    char link[PATH_ROOM];
    struct stat info;
    write_text(in_folder(path, "real"), "old");
    CHECK(symlink("real", in_folder(link, "b")) == 0);
    CHECK(symlink("b", in_folder(link, "a")) == 0);
    CHECK(replace(link, "new", &status) == MLS_OK);
    CHECK(content_is(path, "new"));
    CHECK(lstat(link, &info) == 0 && S_ISLNK(info.st_mode));
}

TEST(dangling_symlink_creates_target_and_loop_is_refused)
{
    char link[PATH_ROOM];
    CHECK(symlink("absent", in_folder(link, "a")) == 0);
    CHECK(replace(link, "new", &status) == MLS_OK);
    CHECK(content_is(in_folder(path, "absent"), "new"));
    CHECK(symlink("loop", in_folder(link, "loop")) == 0);
    CHECK(replace(link, "new", &status) == MLS_E_IO && status.os_error == ELOOP);
    CHECK(entries() == 3);
}

TEST(unwritable_paths_are_refused_before_writing)
{
    CHECK(replace(in_folder(path, "no/file"), "x", &status) == MLS_E_IO);
    CHECK(status.os_error == ENOENT);
    CHECK_FAILS(replace(folder, "x", &status), MLS_E_IO,
                "cannot write the file: Is a directory");
    CHECK(replace(in_folder(path, ""), "x", &status) == MLS_E_IO &&
          status.os_error == EISDIR);
    CHECK(replace("", "x", &status) == MLS_E_IO);
    write_text(in_folder(path, "a"), "old");
    CHECK(chmod(path, 0444) == 0);
    if (geteuid() != 0) { /* root may write everything */
        CHECK(replace(path, "x", &status) == MLS_E_IO && status.os_error == EACCES);
    }
    CHECK(entries() == 1);
}

TEST(mapping_is_readable_until_closed)
{
    int fd = -1;
    uint64_t length = 0;
    mls_mapping mapping = {0};
    write_text(in_folder(path, "a"), "hello");
    REQUIRE(mls_file_open(path, &fd, &length, &status) == MLS_OK);
    REQUIRE(mls_mapping_init(&mapping, fd, length, &status) == MLS_OK);
    close(fd);
    CHECK(replace(path, "other", &status) == MLS_OK);
    CHECK(mapping.bytes == 5 && memcmp(mapping.data, "hello", 5) == 0);
    mls_mapping_fini(&mapping);
    mls_mapping_fini(&mapping);
    CHECK(mls_mapping_init(&mapping, -1, 0, &status) == MLS_OK && mapping.data == NULL);
    CHECK(mls_mapping_init(&mapping, -1, 5, &status) == MLS_E_IO);
}

TEST(mapping_requires_the_expected_length)
{
    mls_mapping mapping = {0};
    write_text(in_folder(path, "a"), "hello");
    REQUIRE(symlink("a", in_folder(path, "link")) == 0);
    const int in = open(folder, O_RDONLY | O_DIRECTORY);
    REQUIRE(in >= 0);
    REQUIRE(mls_mapping_init_at(&mapping, in, "a", false, 5, &status) == MLS_OK);
    CHECK(mapping.bytes == 5 && memcmp(mapping.data, "hello", 5) == 0);
    mls_mapping_fini(&mapping);
    CHECK_FAILS(mls_mapping_init_at(&mapping, in, "a", false, 4, &status), MLS_E_FORMAT,
                "the file's length changed meanwhile");
    CHECK(status.has_offset && status.offset == 5 && mapping.data == NULL);
    CHECK(mls_mapping_init_at(&mapping, in, "none", false, 5, &status) == MLS_E_IO);
    CHECK_FAILS(mls_mapping_init_at(&mapping, in, "link", false, 5, &status),
                MLS_E_FORMAT, "not a regular file but a symbolic link");
    REQUIRE(mls_mapping_init_at(&mapping, in, "link", true, 5, &status) == MLS_OK);
    mls_mapping_fini(&mapping);
    close(in);
}

#ifdef __linux__
TEST(folder_sync_ignores_unsupported_file_systems)
{
    const int fd = open("/proc/self", O_RDONLY | O_DIRECTORY);
    REQUIRE(fd >= 0);
    CHECK(fsync(fd) != 0 && errno == EINVAL);
    CHECK(mls_folder_sync(fd) == 0);
    CHECK(mls_file_sync(fd) == EINVAL);
    close(fd);
    CHECK(mls_folder_sync(-1) == EBADF);
}
#endif

TEST(path_exists_unless_the_system_has_no_such_name)
{
    char link[PATH_ROOM], below[PATH_ROOM + 2], name[300] = "";
    write_text(in_folder(path, "file"), "");
    CHECK(mls_path_exists(path));
    REQUIRE(symlink("nothing", in_folder(link, "link")) == 0);
    CHECK(mls_path_exists(link));
    CHECK(!mls_path_exists(path_of("nothing")));
    snprintf(below, sizeof below, "%s/a", path);
    CHECK(!mls_path_exists(below)); /* ENOTDIR */
    memset(name, 'a', sizeof name - 1);
    CHECK(!mls_path_exists(name)); /* ENAMETOOLONG */
    REQUIRE(unlink(link) == 0 && symlink("link", link) == 0);
    snprintf(below, sizeof below, "%s/a", link);
    CHECK(mls_path_exists(below)); /* ELOOP, which an open reports */
}

TEST(rename_refuses_existing_target_or_swaps_both)
{
    char other[PATH_ROOM];
    write_text(in_folder(path, "a"), "first");
    write_text(in_folder(other, "b"), "second");
    const int refused = mls_path_rename(path, other, MLS_RENAME_NEW);
    CHECK(refused == EEXIST || refused == ENOTSUP);
    CHECK(content_is(path, "first") && content_is(other, "second"));
    if (refused == ENOTSUP) {
        return; /* this file system cannot do it */
    }
    CHECK(mls_path_rename(path, other, MLS_RENAME_SWAP) == 0);
    CHECK(content_is(path, "second") && content_is(other, "first"));
    CHECK(unlink(other) == 0);
    CHECK(mls_path_rename(path, other, MLS_RENAME_SWAP) == ENOENT);
    CHECK(mls_path_rename(path, other, MLS_RENAME_NEW) == 0);
    CHECK(content_is(other, "second") && entries() == 1);
}

TEST(names_of_temporary_files_are_recognised)
{
    static const char *const others[] = {
        "",
        ".",
        ".mlstate-",
        ".mlstate-.tmp",
        ".mlstate-0123456789abcdef",
        ".mlstate-0123456789abcdeg.tmp",
        ".mlstate-0123456789abcdef0.tmp",
        ".mlstate-0123456789abcdef.tmp2",
        "x.mlstate-0123456789abcdef.tmp",
    };
    mls_atomic_file file;
    REQUIRE(mls_atomic_begin(path_of("target"), 0666, &file, &status) == MLS_OK);
    CHECK(mls_atomic_is_temporary(file.temporary));
    mls_atomic_abort(&file);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        CHECK(!mls_atomic_is_temporary(others[i]));
    }
}
