/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * The state of an open file, and the messages to the daemon about files.
 *
 * The daemon gets a file's name at its first read and not at its open. A data
 * open is two opens and a close of one fsp (first O_PATH, then the real one),
 * and most opens look at a file without reading it.
 *
 * The trick in the fall-back: a file's name carries the number of the session
 * for which it was made. When a session without a lane ends, its number moves
 * on and every name is void at once, without a list of them. With a lane the
 * number stays, and the client library names the files to the next daemon.
 */

#include "includes.h"
#include "system/filesys.h"
#include "smbd/smbd.h"
#include "rushes_door.h"

struct rushes_session *rushes_session_of(struct vfs_handle_struct *handle)
{
	return (struct rushes_session *)handle->data;
}

static bool rushes_fsp_is_named(const struct rushes_fsp *file)
{
	return file->file != NULL && file->session->client != NULL &&
	       file->number == file->session->number;
}

void rushes_fsp_unname(struct rushes_fsp *file)
{
	struct rushes_request *request = NULL;

	/*
	 * smbd closes no file with requests outstanding, at which it would
	 * panic; if it ever does, they must not complete into freed memory.
	 */
	while ((request = rushes_request_of(file)) != NULL) {
		rushes_request_forget(request);
		request->done_fn(request, RUSHES_ABANDONED);
	}
	if (rushes_fsp_is_named(file)) {
		rushes_close(file->file);
	}
	file->file = NULL;
	file->was_served = false;
}

static void rushes_fsp_destroy(void *p_data)
{
	struct rushes_fsp *file = (struct rushes_fsp *)p_data;

	rushes_fsp_unname(file);
	rushes_copy_source_closed(file);
	while (file->plain_count > 0) {
		rushes_plain_ended(file);
	}
}

static void rushes_fsp_identify(struct rushes_fsp *file)
{
	struct files_struct *fsp = file->fsp;
	int fd = fsp_get_io_fd(fsp);
	struct stat st = {0};
	int flags;

	if (fstat(fd, &st) == -1 || !S_ISREG(st.st_mode)) {
		return;
	}
	file->is_regular = true;
	file->device = st.st_dev;
	file->inode = st.st_ino;
	/* On an error all flags count as set. */
	flags = fcntl(fd, F_GETFL, 0);
	file->is_append = (flags & O_APPEND) != 0;
	file->is_sync = (flags & O_DSYNC) != 0;

	/*
	 * A stream's bytes lie in another place than its name says, and a
	 * snapshot's name is that of the live file: the daemon cannot open
	 * either by a path.
	 */
	file->is_servable = !fsp_is_alternate_stream(fsp) &&
			    fsp->fsp_name->twrp == 0;
}

struct rushes_fsp *rushes_fsp_get(struct vfs_handle_struct *handle,
				  struct files_struct *fsp)
{
	struct rushes_fsp *file = NULL;

	file = (struct rushes_fsp *)VFS_FETCH_FSP_EXTENSION(handle, fsp);
	if (file != NULL) {
		return file;
	}
	if (fsp->fsp_flags.is_pathref || fsp->fsp_flags.is_directory ||
	    fsp->fake_file_handle != NULL || fsp->print_file != NULL)
	{
		return NULL;
	}
	file = VFS_ADD_FSP_EXTENSION(handle, fsp, struct rushes_fsp,
				     rushes_fsp_destroy);
	if (file == NULL) {
		return NULL;
	}
	file->session = rushes_session_of(handle);
	file->fsp = fsp;
	rushes_fsp_identify(file);
	return file;
}

/* Name a file to the daemon. */
static bool rushes_fsp_name(struct rushes_fsp *file)
{
	struct rushes_session *session = file->session;
	const char *path = file->fsp->fsp_name->base_name;

	while (path[0] == '.' && path[1] == '/') {
		path += 2;
	}
	file->file = rushes_open(session->client,
				 fsp_get_io_fd(file->fsp),
				 path,
				 get_current_uid(file->fsp->conn),
				 get_current_gid(file->fsp->conn));
	file->number = session->number;
	if (file->file == NULL) {
		rushes_session_after_wait(session);
	}
	return file->file != NULL;
}

struct rushes_fsp *rushes_fsp_for_read(struct vfs_handle_struct *handle,
				       struct files_struct *fsp)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct rushes_fsp *file = NULL;

	if (session == NULL || rushes_session_for_read(session) == NULL) {
		return NULL;
	}
	file = rushes_fsp_get(handle, fsp);
	if (file == NULL || !file->is_servable || file->is_leased) {
		return NULL;
	}
	if (file->offer_ns != 0) {
		if (rushes_now_ns() < file->offer_ns ||
		    rushes_request_of(file) != NULL)
		{
			return NULL;
		}

		/* The daemon's answer stays the same as long as the name. */
		rushes_fsp_unname(file);
		file->offer_ns = 0;
	}
	if (!rushes_fsp_is_named(file) && !rushes_fsp_name(file)) {
		return NULL;
	}
	return file;
}

void rushes_fsp_declined(struct rushes_fsp *file)
{
	/*
	 * Asking at every read would cost a round trip each. Never asking again
	 * would keep a file plain for good although a reloaded configuration
	 * serves it. A dead daemon gives the same answer; the module asks its
	 * successor at once.
	 */
	if (file->was_served || file->offer_ns != 0 ||
	    !rushes_alive(file->session->client))
	{
		/*
		 * The daemon serves the file and leaves this one read to the
		 * kernel: the next read may be part of a stream.
		 */
		return;
	}
	file->offer_wait_ns = MIN(RUSHES_OFFER_NS_MAX,
				  MAX(RUSHES_RETRY_NS,
				      2 * file->offer_wait_ns));
	file->offer_ns = rushes_now_ns() + file->offer_wait_ns;
}

bool rushes_is_plain(ssize_t result)
{
	switch (result) {
	case -EIO:
	case -ENODATA:
	case -EREMOTEIO:
	case -EILSEQ:
	case -ETIMEDOUT:
		return false;
	default:
		return result < 0;
	}
}

static void rushes_tell(struct rushes_session *session,
			dev_t device, ino_t inode,
			uint64_t offset, uint64_t length, bool has_bytes)
{
	struct rushes_client *client = NULL;
	int attempt;

	/*
	 * A daemon that dies during this call may already have a successor,
	 * which has to get the report instead.
	 */
	for (attempt = 0; attempt < 2; attempt++) {
		client = rushes_session_for_write(session);
		if (client == NULL) {
			return;
		}
		if (has_bytes) {
			rushes_changed(client, device, inode, offset, length);
		} else {
			rushes_resized(client, device, inode, offset);
		}
		rushes_session_after_wait(session);
		if (session->client != NULL && session->lost_ns == 0) {
			return;
		}
	}
}

void rushes_changed_inode(struct rushes_session *session,
			  dev_t device, ino_t inode,
			  uint64_t offset, uint64_t length)
{
	rushes_tell(session, device, inode, offset, length, true);
}

static void rushes_tell_of_fsp(struct vfs_handle_struct *handle,
			       struct files_struct *fsp,
			       uint64_t offset, uint64_t length,
			       bool has_bytes)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct rushes_fsp *file = NULL;
	int saved_errno = errno;

	if (session != NULL) {
		file = rushes_fsp_get(handle, fsp);
	}
	if (file == NULL || !file->is_regular) {
		errno = saved_errno;
		return;
	}
	/*
	 * Set it now: a flush may have overtaken the write. For a length alone
	 * the daemon's own sync is enough; and a sync of this descriptor would
	 * get errors that the daemon has handled.
	 */
	if (has_bytes) {
		file->owes_sync = true;
	}
	if (file->is_append && has_bytes) {
		offset = 0;
		length = UINT64_MAX;
	}
	/*
	 * A daemon that starts from here on reads the new bytes, and it may be
	 * the one for which this would wait.
	 */
	rushes_plain_ended(file);
	rushes_tell(session, file->device, file->inode, offset, length,
		    has_bytes);
	errno = saved_errno;
}

void rushes_changed_fsp(struct vfs_handle_struct *handle,
			struct files_struct *fsp,
			uint64_t offset, uint64_t length)
{
	rushes_tell_of_fsp(handle, fsp, offset, length, true);
}

void rushes_resized_fsp(struct vfs_handle_struct *handle,
			struct files_struct *fsp,
			uint64_t offset)
{
	rushes_tell_of_fsp(handle, fsp, offset, UINT64_MAX, false);
}

void rushes_changed_orphan(struct vfs_handle_struct *handle,
			   struct files_struct *fsp,
			   uint64_t offset, uint64_t length)
{
	struct rushes_session *session = rushes_session_of(handle);

	if (session != NULL && session->client != NULL) {
		rushes_changed_fsp(handle, fsp, offset, length);
	}
}

bool rushes_name_matters(struct vfs_handle_struct *handle,
			 struct files_struct *dirfsp,
			 const struct smb_filename *smb_fname,
			 SMB_STRUCT_STAT *st)
{
	struct rushes_session *session = rushes_session_of(handle);
	int saved_errno = errno;
	int ret;

	if (session == NULL || is_named_stream(smb_fname) ||
	    rushes_session_for_write(session) == NULL)
	{
		errno = saved_errno;
		return false;
	}
	ret = SMB_VFS_NEXT_FSTATAT(handle, dirfsp, smb_fname, st,
				   AT_SYMLINK_NOFOLLOW);
	errno = saved_errno;
	/* The file lives on under another name, with every byte. */
	return ret == 0 && S_ISREG(st->st_ex_mode) && st->st_ex_nlink <= 1;
}

void rushes_gone_inode(struct vfs_handle_struct *handle,
		       const SMB_STRUCT_STAT *st)
{
	struct rushes_session *session = rushes_session_of(handle);
	int saved_errno = errno;
	int attempt;

	for (attempt = 0; attempt < 2; attempt++) {
		struct rushes_client *client =
			rushes_session_for_write(session);
		if (client == NULL) {
			break;
		}
		rushes_gone(client, st->st_ex_dev, st->st_ex_ino);
		rushes_session_after_wait(session);
		if (session->client != NULL && session->lost_ns == 0) {
			break;
		}
	}
	errno = saved_errno;
}
