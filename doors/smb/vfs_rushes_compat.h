/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * The differences between releases of Samba, for vfs_rushes.c; no other file
 * may ask for a version.
 *
 * The interface number moves with nearly every release and smbd refuses a
 * module of another number. So this file checks it with a readable error,
 * before a client finds no share. 47 is Samba 4.17 (Debian 12), 48 is 4.18, 49
 * is 4.19 to 4.21, 50 is 4.22 (Debian 13), 51 is 4.23, 52 is 4.24. Tried: 47
 * and 50.
 */
#ifndef VFS_RUSHES_COMPAT_H
#define VFS_RUSHES_COMPAT_H

#if SMB_VFS_INTERFACE_VERSION < 47
#error "vfs_rushes needs Samba 4.17 or later (VFS interface 47): fstatat"
#endif

/*
 * 4.22 (50) gave renameat an argument for the manner of renaming. Spelled here
 * once: RUSHES_RENAME_ARGS follows the other parameters, RUSHES_RENAME_PASS
 * passes it on. SMB_VFS_NEXT_RENAMEAT is a macro that counts its arguments
 * before it expands RUSHES_RENAME_PASS, so the module calls the function behind
 * the macro.
 */
#if SMB_VFS_INTERFACE_VERSION >= 50
#define RUSHES_RENAME_ARGS , const struct vfs_rename_how *how
#define RUSHES_RENAME_PASS , how
#else
#define RUSHES_RENAME_ARGS
#define RUSHES_RENAME_PASS
#endif

/*
 * Until 4.18 (48) readdir could also return the result of stat:
 * RUSHES_READDIR_ARGS follows the other parameters, RUSHES_READDIR_PASS passes
 * it on, and RUSHES_READDIR_STAT is it, or NULL.
 */
#if SMB_VFS_INTERFACE_VERSION >= 49
#define RUSHES_READDIR_ARGS
#define RUSHES_READDIR_PASS
#define RUSHES_READDIR_STAT ((SMB_STRUCT_STAT *)NULL)
#else
#define RUSHES_READDIR_ARGS , SMB_STRUCT_STAT *sbuf
#define RUSHES_READDIR_PASS , sbuf
#define RUSHES_READDIR_STAT sbuf
#endif

#endif /* VFS_RUSHES_COMPAT_H */
