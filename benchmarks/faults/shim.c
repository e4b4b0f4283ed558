/* System calls that fail, or kill the process, on demand.
 *
 * Preloaded (LD_PRELOAD) it stands before the C library's file functions.  Calls that change
 * something below the watched folders are counted; at the n-th the process is killed (before
 * the call, after it, or after half of a write) or the call fails.  Every such call that was
 * done is logged, with its bytes, so that the state of the disk after a power cut can be
 * worked out (power_cut.py).  It does nothing until `fault_watch` is called; two settings
 * are read from the environment, for commands that are started anew:
 *
 *     FAULT_LINK=errno     link() fails everywhere: a file system without hard links
 *     FAULT_FLOCK=errno    flock() fails everywhere
 *     FAULT_FCNTL=errno    the locks of fcntl() fail everywhere
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { KILL_BEFORE = 1, KILL_AFTER, KILL_HALF, FAIL };
enum { OP_OPEN = 1, OP_CLOSE, OP_WRITE, OP_TRUNCATE, OP_SYNC, OP_RENAME, OP_UNLINK, OP_LINK,
       OP_MKDIR, OP_RMDIR };
enum { MAX_FD = 65536 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_size;
static int log_fd = -1;
static long count, nth, hits;
static int action, fault_errno, forever;
static pid_t owner;
static unsigned char watched[MAX_FD];
static int deny_link, deny_flock, deny_fcntl;

__attribute__((constructor)) static void read_settings(void) {
    const char *text;
    if ((text = getenv("FAULT_LINK"))) deny_link = atoi(text);
    if ((text = getenv("FAULT_FLOCK"))) deny_flock = atoi(text);
    if ((text = getenv("FAULT_FCNTL"))) deny_fcntl = atoi(text);
}

/* Watch a folder and log to a file; `at` 0 counts and never strikes. */
void fault_watch(const char *folder, const char *log, long at, int what, int error, int always) {
    snprintf(root, sizeof root, "%s", folder);
    root_size = strlen(root);
    log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    count = hits = 0;
    nth = at, action = what, fault_errno = error, forever = always;
    owner = getpid();
}

long fault_count(void) { return count; }
long fault_hits(void) { return hits; }

static int is_on(void) { return root_size && owner == getpid(); }

static int is_below(const char *path) {
    return !strncmp(path, root, root_size) && (!path[root_size] || path[root_size] == '/');
}

static int resolve(int folder, const char *path, char *out) {
    char base[PATH_MAX], link[64];
    ssize_t size;
    if (!is_on()) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return is_below(out);
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        size = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
        if (size < 0) return 0;
        base[size] = 0;
    }
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    return is_below(out);
}

static int is_watched(int fd) { return is_on() && fd >= 0 && fd < MAX_FD && watched[fd]; }

static void note(int op, int fd, int64_t number, const char *path, const void *data, size_t size) {
    struct { int32_t op, fd; int64_t number; uint32_t path, data; } head;
    int saved = errno;
    head.op = op, head.fd = fd, head.number = number;
    head.path = path ? strlen(path) : 0, head.data = size;
    syscall(SYS_write, log_fd, &head, sizeof head);
    if (head.path) syscall(SYS_write, log_fd, path, head.path);
    if (size) syscall(SYS_write, log_fd, data, size);
    errno = saved;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Count a call; return what is to happen to it.  A full disk still lets files go. */
static int strike(int frees) {
    count++;
    if (!nth || count < nth || (count > nth && !forever)) return 0;
    if (action == FAIL && fault_errno == ENOSPC && frees) return 0;
    hits++;
    if (action == KILL_BEFORE) die();
    return action;
}

#define BEGIN(frees)                                                                    \
    pthread_mutex_lock(&lock);                                                          \
    int what = strike(frees);                                                           \
    if (what == FAIL) {                                                                 \
        pthread_mutex_unlock(&lock);                                                    \
        errno = fault_errno;                                                            \
        return -1;                                                                      \
    }
#define END                                                                             \
    if (what) die();                                                                    \
    pthread_mutex_unlock(&lock);

static int do_open(int folder, const char *path, int flags, mode_t mode) {
    char whole[PATH_MAX];
    int fd;
    if (!resolve(folder, path, whole)) {
        fd = syscall(SYS_openat, folder, path, flags, mode);
        if (is_on() && fd >= 0 && fd < MAX_FD) watched[fd] = 0;
        return fd;
    }
    if (!(flags & (O_CREAT | O_TRUNC))) {
        pthread_mutex_lock(&lock);
        fd = syscall(SYS_openat, folder, path, flags, mode);
        if (fd >= 0 && fd < MAX_FD) watched[fd] = 1, note(OP_OPEN, fd, flags, whole, 0, 0);
        pthread_mutex_unlock(&lock);
        return fd;
    }
    BEGIN(0)
    fd = syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0 && fd < MAX_FD) watched[fd] = 1, note(OP_OPEN, fd, flags, whole, 0, 0);
    END
    return fd;
}

#define TAKE_MODE                                                                       \
    mode_t mode = 0;                                                                    \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                \
        va_list given;                                                                  \
        va_start(given, flags);                                                         \
        mode = va_arg(given, mode_t);                                                   \
        va_end(given);                                                                  \
    }
int open(const char *path, int flags, ...) { TAKE_MODE return do_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { TAKE_MODE return do_open(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { TAKE_MODE return do_open(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { TAKE_MODE return do_open(at, path, flags, mode); }
int __open_2(const char *path, int flags) { return do_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return do_open(AT_FDCWD, path, flags, 0); }
int creat(const char *path, mode_t mode) {
    return do_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

int close(int fd) {
    int result;
    if (!is_watched(fd)) return syscall(SYS_close, fd);
    pthread_mutex_lock(&lock);
    watched[fd] = 0;
    note(OP_CLOSE, fd, 0, 0, 0, 0);
    result = syscall(SYS_close, fd);
    pthread_mutex_unlock(&lock);
    return result;
}

static ssize_t do_write(int fd, const void *data, size_t size, off_t offset) {
    ssize_t done;
    BEGIN(0)
    if (what == KILL_HALF) size /= 2;
    if (offset < 0) {
        done = syscall(SYS_write, fd, data, size);
        offset = lseek(fd, 0, SEEK_CUR) - (done > 0 ? done : 0);
    } else {
        done = syscall(SYS_pwrite64, fd, data, size, offset);
    }
    if (done > 0) note(OP_WRITE, fd, offset, 0, data, done);
    END
    return done;
}
ssize_t write(int fd, const void *data, size_t size) {
    return is_watched(fd) ? do_write(fd, data, size, -1) : syscall(SYS_write, fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    if (is_watched(fd)) return do_write(fd, data, size, offset);
    return syscall(SYS_pwrite64, fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    return pwrite(fd, data, size, offset);
}

static int do_sync(int fd, long number) {
    int result;
    BEGIN(0)
    result = syscall(number, fd);
    if (!result) note(OP_SYNC, fd, 0, 0, 0, 0);
    END
    return result;
}
int fsync(int fd) { return is_watched(fd) ? do_sync(fd, SYS_fsync) : syscall(SYS_fsync, fd); }
int fdatasync(int fd) {
    return is_watched(fd) ? do_sync(fd, SYS_fdatasync) : syscall(SYS_fdatasync, fd);
}

int ftruncate(int fd, off_t size) {
    int result;
    if (!is_watched(fd)) return syscall(SYS_ftruncate, fd, size);
    BEGIN(1)
    result = syscall(SYS_ftruncate, fd, size);
    if (!result) note(OP_TRUNCATE, fd, size, 0, 0, 0);
    END
    return result;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

static int do_rename(int at, const char *from, int to_at, const char *to, unsigned flags) {
    char source[PATH_MAX], target[PATH_MAX];
    int result;
    if (!resolve(at, from, source) || !resolve(to_at, to, target))
        return syscall(SYS_renameat2, at, from, to_at, to, flags);
    BEGIN(0)
    result = syscall(SYS_renameat2, at, from, to_at, to, flags);
    if (!result) note(OP_RENAME, -1, 0, source, target, strlen(target));
    END
    return result;
}
int rename(const char *from, const char *to) { return do_rename(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int at, const char *from, int to_at, const char *to) {
    return do_rename(at, from, to_at, to, 0);
}
int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    return do_rename(at, from, to_at, to, flags);
}

static int do_unlink(int at, const char *path, int flags) {
    char whole[PATH_MAX];
    int result;
    if (!resolve(at, path, whole)) return syscall(SYS_unlinkat, at, path, flags);
    BEGIN(1)
    result = syscall(SYS_unlinkat, at, path, flags);
    if (!result) note(flags & AT_REMOVEDIR ? OP_RMDIR : OP_UNLINK, -1, 0, whole, 0, 0);
    END
    return result;
}
int unlink(const char *path) { return do_unlink(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return do_unlink(at, path, flags); }
int rmdir(const char *path) { return do_unlink(AT_FDCWD, path, AT_REMOVEDIR); }

static int do_link(int at, const char *from, int to_at, const char *to, int flags) {
    char source[PATH_MAX], target[PATH_MAX];
    int result;
    if (deny_link) {
        errno = deny_link;
        return -1;
    }
    if (!resolve(at, from, source) || !resolve(to_at, to, target))
        return syscall(SYS_linkat, at, from, to_at, to, flags);
    BEGIN(0)
    result = syscall(SYS_linkat, at, from, to_at, to, flags);
    if (!result) note(OP_LINK, -1, 0, source, target, strlen(target));
    END
    return result;
}
int link(const char *from, const char *to) { return do_link(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int at, const char *from, int to_at, const char *to, int flags) {
    return do_link(at, from, to_at, to, flags);
}

int mkdirat(int at, const char *path, mode_t mode) {
    char whole[PATH_MAX];
    int result;
    if (!resolve(at, path, whole)) return syscall(SYS_mkdirat, at, path, mode);
    BEGIN(0)
    result = syscall(SYS_mkdirat, at, path, mode);
    if (!result) note(OP_MKDIR, -1, 0, whole, 0, 0);
    END
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int flock(int fd, int operation) {
    if (deny_flock) {
        errno = deny_flock;
        return -1;
    }
    return syscall(SYS_flock, fd, operation);
}

static int do_fcntl(int fd, int command, void *argument) {
    int locks = command == F_SETLK || command == F_SETLKW || command == F_GETLK ||
                command == F_OFD_SETLK || command == F_OFD_SETLKW || command == F_OFD_GETLK;
    if (deny_fcntl && locks) {
        errno = deny_fcntl;
        return -1;
    }
    return syscall(SYS_fcntl, fd, command, argument);
}
#define TAKE_ARGUMENT                                                                   \
    va_list given;                                                                      \
    va_start(given, command);                                                           \
    void *argument = va_arg(given, void *);                                             \
    va_end(given);
int fcntl(int fd, int command, ...) { TAKE_ARGUMENT return do_fcntl(fd, command, argument); }
int fcntl64(int fd, int command, ...) { TAKE_ARGUMENT return do_fcntl(fd, command, argument); }
