/* Loaded into a server before libc: what fsync has made safe is written down, a stalled disk lets no
 * fsync return, and a full one takes no byte. In DISK_FOLDER: while `stall` exists nothing is synced,
 * while `full` exists nothing is written; `begun` has a line for each sync that was asked for,
 * `synced` the inode and the length of each that was done. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void in_folder(char *path, size_t size, const char *name)
{
    snprintf(path, size, "%s/%s", getenv("DISK_FOLDER"), name);
}

static void note(const char *name, unsigned long long inode, long long length)
{
    char path[4096], line[64];
    in_folder(path, sizeof path, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd < 0)
        abort();
    int used = snprintf(line, sizeof line, "%llu %lld\n", inode, length);
    if (syscall(SYS_write, fd, line, used) != used)
        abort();
    close(fd);
}

static int watched(int fd, const char *function)
{
    int (*sync)(int) = (int (*)(int))dlsym(RTLD_NEXT, function);
    struct stat file;
    char stall[4096];
    if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode))
        return sync(fd);
    note("begun", file.st_ino, file.st_size);
    in_folder(stall, sizeof stall, "stall");
    while (access(stall, F_OK) == 0)
        usleep(1000);
    int result = sync(fd);
    if (result == 0)
        note("synced", file.st_ino, file.st_size);
    return result;
}

int fsync(int fd) { return watched(fd, "fsync"); }
int fdatasync(int fd) { return watched(fd, "fdatasync"); }

ssize_t write(int fd, const void *bytes, size_t count)
{
    struct stat file;
    char full[4096];
    in_folder(full, sizeof full, "full");
    if (access(full, F_OK) == 0 && fstat(fd, &file) == 0 && S_ISREG(file.st_mode)) {
        errno = ENOSPC;
        return -1;
    }
    return syscall(SYS_write, fd, bytes, count);
}
