/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * Samba's door to Rushes: reads come out of the daemon's cache, and the daemon
 * gets a report of every change of a file before the client gets its answer.
 *
 *   [media]
 *   path = /srv/media
 *   vfs objects = rushes
 *   rushes:socket = /run/rushes/session.sock
 *   rushes:share = media
 *
 * Put it last in "vfs objects": it replaces vfs_default's I/O on real
 * descriptors, the modules before it translate names and streams.
 *
 * It decides nothing: the daemon chooses which file is cached, read ahead,
 * refused, or taken into the write buffer. It keeps no data: these lie in a
 * lane, which outlives smbd and the daemon. I/O on smbd's own descriptor is
 * right as long as the table of facts has no fact of the file; otherwise the
 * daemon, or its successor, first writes the file's bytes; see rushes_write.c.
 * See engine/shm for the client library; smbd's main thread makes all calls to
 * it.
 *
 * One tree connect is one session with the daemon; see rushes_session.c. The
 * daemon gets a file's name at its first read; see rushes_fsp.c.
 *
 * This file has the table of Samba's entries, the share, attributes and names;
 * vfs_rushes_read.c and vfs_rushes_write.c have the entries that move bytes.
 */

#include "includes.h"
#include "system/filesys.h"
#include "smbd/smbd.h"
#include "smbd/globals.h"
#include "lib/tsocket/tsocket.h"
#include "version.h"
#include "vfs_rushes_compat.h"
#include "rushes_door.h"
#include "vfs_rushes_entries.h"

/* "rushes check" compares this with the installed smbd. */
__attribute__((used)) static const char vfs_rushes_built_for[] =
	"rushes built for Samba " SAMBA_VERSION_STRING;

int vfs_rushes_debug_level = DBGC_VFS;

#define RUSHES_SOCKET_DEFAULT "/run/rushes/session.sock"
#define RUSHES_RECOVER_DEFAULT "rushes recover"

/*
 * Connecting.
 */

static int vfs_rushes_connect(struct vfs_handle_struct *handle,
			      const char *service,
			      const char *user)
{
	struct connection_struct *conn = handle->conn;
	struct rushes_session *session = NULL;
	int snum = SNUM(conn);
	char *address = NULL;
	int ret;

	ret = SMB_VFS_NEXT_CONNECT(handle, service, user);
	if (ret < 0) {
		return ret;
	}

	/* No media there; smbd's own connections have no client. */
	if (IS_IPC(conn) || IS_PRINT(conn) || conn->sconn == NULL ||
	    conn->sconn->remote_address == NULL)
	{
		return 0;
	}

	session = talloc_zero(conn, struct rushes_session);
	if (session == NULL) {
		goto nomem;
	}
	session->ev = conn->sconn->ev_ctx;
	session->socket_path = talloc_strdup(
		session, lp_parm_const_string(snum, "rushes", "socket",
					      RUSHES_SOCKET_DEFAULT));
	session->share = talloc_strdup(
		session, lp_parm_const_string(snum, "rushes", "share",
					      lp_const_servicename(snum)));
	session->user = talloc_strdup(session, user);
	session->recover_command = talloc_strdup(
		session, lp_parm_const_string(snum, "rushes", "recover",
					      RUSHES_RECOVER_DEFAULT));
	session->recover_ns = RUSHES_NS_PER_S *
		(uint64_t)MAX(lp_parm_int(snum, "rushes", "recover after",
					  RUSHES_RECOVER_S), 0);
	session->hung_ns = RUSHES_NS_PER_S *
		(uint64_t)MAX(lp_parm_int(snum, "rushes", "hung after",
					  RUSHES_HUNG_S), 0);
	address = tsocket_address_inet_addr_string(
		conn->sconn->remote_address, session);
	session->address = (address != NULL) ? address : "";
	if (session->socket_path == NULL || session->share == NULL ||
	    session->user == NULL || session->recover_command == NULL)
	{
		goto nomem;
	}

	SMB_VFS_HANDLE_SET_DATA(handle, session, NULL,
				struct rushes_session, goto nomem);
	rushes_session_connect(session);
	return 0;

nomem:
	TALLOC_FREE(session);
	SMB_VFS_NEXT_DISCONNECT(handle);
	errno = ENOMEM;
	return -1;
}

static void vfs_rushes_disconnect(struct vfs_handle_struct *handle)
{
	struct rushes_session *session = rushes_session_of(handle);

	if (session != NULL) {
		rushes_session_disconnect(session);
		handle->data = NULL;
		TALLOC_FREE(session);
	}
	SMB_VFS_NEXT_DISCONNECT(handle);
}

/*
 * Opening and closing.
 */

static int vfs_rushes_openat(struct vfs_handle_struct *handle,
			     const struct files_struct *dirfsp,
			     const struct smb_filename *smb_fname,
			     struct files_struct *fsp,
			     const struct vfs_open_how *how)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct stat st = {0};
	int fd;

	fd = SMB_VFS_NEXT_OPENAT(handle, dirfsp, smb_fname, fsp, how);

	/* smbd itself truncates by ftruncate, but a module may do it here. */
	if (fd == -1 || (how->flags & O_TRUNC) == 0 || session == NULL) {
		return fd;
	}
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
		rushes_changed_inode(session, st.st_dev, st.st_ino,
				     0, UINT64_MAX);
	}
	return fd;
}

static int vfs_rushes_close(struct vfs_handle_struct *handle,
			    struct files_struct *fsp)
{
	/*
	 * Also called for the O_PATH descriptor of an fsp that lives on, but
	 * then it has not been read and there is nothing to remove.
	 */
	VFS_REMOVE_FSP_EXTENSION(handle, fsp);
	return SMB_VFS_NEXT_CLOSE(handle, fsp);
}

/*
 * Attributes of a file.
 */

static int vfs_rushes_stat(struct vfs_handle_struct *handle,
			   struct smb_filename *smb_fname)
{
	int ret = SMB_VFS_NEXT_STAT(handle, smb_fname);

	if (ret == 0) {
		rushes_fix_stat(handle, &smb_fname->st, AT_FDCWD,
				smb_fname->base_name);
	}
	return ret;
}

static int vfs_rushes_lstat(struct vfs_handle_struct *handle,
			    struct smb_filename *smb_fname)
{
	int ret = SMB_VFS_NEXT_LSTAT(handle, smb_fname);

	if (ret == 0) {
		rushes_fix_stat(handle, &smb_fname->st, AT_FDCWD,
				smb_fname->base_name);
	}
	return ret;
}

static int vfs_rushes_fstat(struct vfs_handle_struct *handle,
			    struct files_struct *fsp, SMB_STRUCT_STAT *sbuf)
{
	int ret = SMB_VFS_NEXT_FSTAT(handle, fsp, sbuf);

	if (ret == 0) {
		rushes_fix_stat(handle, sbuf, fsp_get_pathref_fd(fsp), NULL);
	}
	return ret;
}

static int vfs_rushes_fstatat(struct vfs_handle_struct *handle,
			      const struct files_struct *dirfsp,
			      const struct smb_filename *smb_fname,
			      SMB_STRUCT_STAT *sbuf,
			      int flags)
{
	int ret = SMB_VFS_NEXT_FSTATAT(handle, dirfsp, smb_fname, sbuf, flags);

	if (ret == 0) {
		rushes_fix_stat(handle, sbuf, fsp_get_pathref_fd(dirfsp),
				smb_fname->base_name);
	}
	return ret;
}

static struct dirent *vfs_rushes_readdir(struct vfs_handle_struct *handle,
					 struct files_struct *dirfsp,
					 DIR *dirp
					 RUSHES_READDIR_ARGS)
{
	SMB_STRUCT_STAT *st = RUSHES_READDIR_STAT;
	struct dirent *entry = NULL;

	entry = smb_vfs_call_readdir(handle->next, dirfsp, dirp
				     RUSHES_READDIR_PASS);
	if (entry != NULL && st != NULL && VALID_STAT(*st)) {
		rushes_fix_stat(handle, st, fsp_get_pathref_fd(dirfsp),
				entry->d_name);
	}
	return entry;
}

/* The daemon sets a file's time when it has written all of it. */
static int vfs_rushes_fntimes(struct vfs_handle_struct *handle,
			      struct files_struct *fsp,
			      struct smb_file_time *ft)
{
	SMB_STRUCT_STAT *st = &fsp->fsp_name->st;

	if (S_ISREG(st->st_ex_mode) && !is_omit_timespec(&ft->mtime) &&
	    !rushes_time_inode(rushes_session_of(handle), st->st_ex_dev,
			       st->st_ex_ino, ft->mtime))
	{
		return -1;
	}
	return SMB_VFS_NEXT_FNTIMES(handle, fsp, ft);
}

/* The file shows data and holes correctly once it has all its bytes. */
static off_t vfs_rushes_lseek(struct vfs_handle_struct *handle,
			      struct files_struct *fsp,
			      off_t offset,
			      int whence)
{
	if (whence == SEEK_DATA || whence == SEEK_HOLE || whence == SEEK_END) {
		if (!rushes_settle_fsp(handle, fsp)) {
			return -1;
		}
	}
	return SMB_VFS_NEXT_LSEEK(handle, fsp, offset, whence);
}

/*
 * Names. The daemon holds files open: one that has lost its last name would
 * keep its space.
 */

static int vfs_rushes_unlinkat(struct vfs_handle_struct *handle,
			       struct files_struct *dirfsp,
			       const struct smb_filename *smb_fname,
			       int flags)
{
	SMB_STRUCT_STAT st = {0};
	bool matters = false;
	int ret;

	if ((flags & AT_REMOVEDIR) == 0) {
		matters = rushes_name_matters(handle, dirfsp, smb_fname, &st);
	}
	ret = SMB_VFS_NEXT_UNLINKAT(handle, dirfsp, smb_fname, flags);
	if (ret == 0 && matters) {
		rushes_gone_inode(handle, &st);
	}
	return ret;
}

static int vfs_rushes_renameat(struct vfs_handle_struct *handle,
			       struct files_struct *srcfsp,
			       const struct smb_filename *smb_fname_src,
			       struct files_struct *dstfsp,
			       const struct smb_filename *smb_fname_dst
			       RUSHES_RENAME_ARGS)
{
	SMB_STRUCT_STAT st = {0};
	bool matters;
	int ret;

	/* The moved file keeps its bytes; the one that it replaces is lost. */
	matters = rushes_name_matters(handle, dstfsp, smb_fname_dst, &st);
	ret = smb_vfs_call_renameat(handle->next, srcfsp, smb_fname_src,
				    dstfsp, smb_fname_dst RUSHES_RENAME_PASS);
	if (ret == 0 && matters) {
		rushes_gone_inode(handle, &st);
	}
	return ret;
}

/*
 * A client whose connection is lost may come back for its file, and gets it if
 * stat returns the same as now, ctime and blocks included. So the daemon first
 * does the work that would change them later: it writes its bytes and frees
 * reserved blocks.
 */
static NTSTATUS vfs_rushes_durable_disconnect(struct vfs_handle_struct *handle,
					      struct files_struct *fsp,
					      const DATA_BLOB old_cookie,
					      TALLOC_CTX *mem_ctx,
					      DATA_BLOB *new_cookie)
{
	struct rushes_fsp *file = NULL;

	if (rushes_session_of(handle) != NULL) {
		file = rushes_fsp_get(handle, fsp);
	}
	if (file != NULL && file->is_regular) {
		rushes_fsp_unname(file);
		if (rushes_hold_fsp(handle, fsp)) {
			rushes_changed_fsp(handle, fsp, 0, 0);
		}
	}
	return SMB_VFS_NEXT_DURABLE_DISCONNECT(handle, fsp, old_cookie,
					       mem_ctx, new_cookie);
}

/*
 * "kernel oplocks = yes". Every other open of the file breaks a lease on smbd's
 * descriptor, and the daemon's is one: while smbd holds a lease it reads by
 * itself. A descriptor that the daemon already has may keep smbd from getting
 * the lease; then the client simply gets no oplock.
 */
static int vfs_rushes_linux_setlease(struct vfs_handle_struct *handle,
				     struct files_struct *fsp,
				     int leasetype)
{
	struct rushes_fsp *file = NULL;
	int ret;

	if (rushes_session_of(handle) != NULL) {
		file = rushes_fsp_get(handle, fsp);
	}
	if (file != NULL && leasetype != F_UNLCK) {
		if (rushes_request_of(file) == NULL) {
			rushes_fsp_unname(file);
		}
		file->is_leased = true;
	}
	ret = SMB_VFS_NEXT_LINUX_SETLEASE(handle, fsp, leasetype);
	if (file != NULL) {
		file->is_leased = (ret == 0 && leasetype != F_UNLCK);
	}
	return ret;
}

/*
 * doors/smb/vfs-table.txt gives the reason for every other entry that is not
 * here; a test compares both with the headers.
 */
static struct vfs_fn_pointers vfs_rushes_fns = {
	.connect_fn = vfs_rushes_connect,
	.disconnect_fn = vfs_rushes_disconnect,

	.readdir_fn = vfs_rushes_readdir,

	.openat_fn = vfs_rushes_openat,
	.close_fn = vfs_rushes_close,
	.pread_fn = vfs_rushes_pread,
	.pread_send_fn = vfs_rushes_pread_send,
	.pread_recv_fn = vfs_rushes_pread_recv,
	.pwrite_fn = vfs_rushes_pwrite,
	.pwrite_send_fn = vfs_rushes_pwrite_send,
	.pwrite_recv_fn = vfs_rushes_pwrite_recv,
	.sendfile_fn = vfs_rushes_sendfile,
	.recvfile_fn = vfs_rushes_recvfile,
	.lseek_fn = vfs_rushes_lseek,
	.fsync_send_fn = vfs_rushes_fsync_send,
	.fsync_recv_fn = vfs_rushes_fsync_recv,
	.stat_fn = vfs_rushes_stat,
	.lstat_fn = vfs_rushes_lstat,
	.fstat_fn = vfs_rushes_fstat,
	.fstatat_fn = vfs_rushes_fstatat,
	.fntimes_fn = vfs_rushes_fntimes,
	.renameat_fn = vfs_rushes_renameat,
	.unlinkat_fn = vfs_rushes_unlinkat,
	.ftruncate_fn = vfs_rushes_ftruncate,
	.fallocate_fn = vfs_rushes_fallocate,
	.linux_setlease_fn = vfs_rushes_linux_setlease,
	.durable_disconnect_fn = vfs_rushes_durable_disconnect,
	.offload_read_send_fn = vfs_rushes_offload_read_send,
	.offload_write_send_fn = vfs_rushes_offload_write_send,
	.offload_write_recv_fn = vfs_rushes_offload_write_recv,
};

NTSTATUS samba_init_module(TALLOC_CTX *ctx)
{
	NTSTATUS status;

	status = smb_register_vfs(SMB_VFS_INTERFACE_VERSION, "rushes",
				  &vfs_rushes_fns);
	if (!NT_STATUS_IS_OK(status)) {
		return status;
	}

	vfs_rushes_debug_level = debug_add_class("rushes");
	if (vfs_rushes_debug_level == -1) {
		vfs_rushes_debug_level = DBGC_VFS;
	}
	return NT_STATUS_OK;
}
