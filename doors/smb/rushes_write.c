/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * The work around changes while the daemon keeps written bytes: it must write
 * all it has of a file before smbd changes the file on its own descriptor, and
 * it knows better than the file system how long a file is.
 */

#include "includes.h"
#include "system/filesys.h"
#include "smbd/smbd.h"
#include "lib/util/dlinklist.h"
#include "rushes_door.h"

struct rushes_fsp *rushes_fsp_for_write(struct vfs_handle_struct *handle,
					struct files_struct *fsp)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct rushes_fsp *file = NULL;

	if (session == NULL || rushes_session_for_read(session) == NULL ||
	    !rushes_takes_writes(session->client))
	{
		return NULL;
	}
	file = rushes_fsp_for_read(handle, fsp);

	/*
	 * O_APPEND writes at another place than the given offset. smbd sets
	 * O_SYNC for a file that a client opened for write-through: the
	 * descriptor itself keeps that promise, and no sync follows.
	 */
	if (file == NULL || file->is_append || file->is_sync) {
		return NULL;
	}
	return file;
}

bool rushes_write_is_plain(ssize_t result)
{
	switch (result) {
	case -ENOSPC:
	case -EDQUOT:
	case -EFBIG:
	case -EROFS:
		return false;
	default:
		return rushes_is_plain(result);
	}
}

bool rushes_has_fact(struct rushes_session *session, dev_t device, ino_t inode)
{
	struct rushes_fact fact;

	if (session == NULL) {
		return false;
	}
	rushes_session_refresh(session);
	return rushes_fact_of(session->facts, device, inode, &fact);
}

/* True: the file has all its bytes, or there is a daemon that has them. */
static bool rushes_wait_for_fact(struct rushes_session *session, dev_t device,
				 ino_t inode)
{
	uint64_t end_ns = rushes_now_ns() + RUSHES_PATIENCE_S * RUSHES_NS_PER_S;

	while (!rushes_session_has_daemon(session) &&
	       rushes_has_fact(session, device, inode))
	{
		if (rushes_now_ns() > end_ns) {
			errno = EIO;
			return false;
		}
		rushes_session_seek(session);
		if (!rushes_session_has_daemon(session)) {
			smb_msleep(RUSHES_LOOK_MS);
		}
	}
	return true;
}

/* For readers alone: a daemon that starts meanwhile does no harm. */
static bool rushes_hold_inode(struct rushes_session *session, dev_t device,
			      ino_t inode)
{
	uint64_t end_ns = rushes_now_ns() + RUSHES_PATIENCE_S * RUSHES_NS_PER_S;
	int saved_errno = errno;
	ssize_t ret = RUSHES_PLAIN;

	rushes_session_for_write(session);
	while (ret == RUSHES_PLAIN && session->facts != NULL) {
		if (!rushes_wait_for_fact(session, device, inode)) {
			return false;
		}
		if (!rushes_session_has_daemon(session)) {
			break;
		}
		if (rushes_now_ns() > end_ns) {
			errno = EIO;
			return false;
		}
		ret = rushes_hold(session->client, device, inode);
		rushes_session_after_wait(session);
	}
	errno = saved_errno;
	if (ret < 0 && ret != RUSHES_PLAIN) {
		errno = -ret;
		return false;
	}
	return true;
}

bool rushes_time_inode(struct rushes_session *session, dev_t device,
		       ino_t inode, struct timespec changed)
{
	int64_t changed_ns = (int64_t)changed.tv_sec * RUSHES_NS_PER_S +
			     changed.tv_nsec;
	bool told = false;

	while (!told && rushes_has_fact(session, device, inode)) {
		if (!rushes_wait_for_fact(session, device, inode)) {
			return false;
		}
		if (!rushes_session_has_daemon(session)) {
			break;
		}
		told = rushes_timed(session->client, device, inode, changed_ns);
		rushes_session_after_wait(session);
	}
	return true;
}

/* NULL: no daemon can have bytes of it that the file lacks. */
static struct rushes_fsp *rushes_fsp_of_writer(struct vfs_handle_struct *handle,
					       struct files_struct *fsp)
{
	struct rushes_session *session = rushes_session_of(handle);
	struct rushes_fsp *file = NULL;

	if (session == NULL) {
		return NULL;
	}
	rushes_session_refresh(session);
	if (session->facts == NULL) {
		return NULL;
	}
	file = rushes_fsp_get(handle, fsp);
	return (file != NULL && file->is_regular) ? file : NULL;
}

static bool rushes_plain_begins(struct rushes_fsp *file)
{
	struct rushes_session *session = file->session;

	if (!rushes_plain_begin(session->facts)) {
		return false;
	}
	session->plain_count += 1;
	file->plain_count += 1;
	return true;
}

void rushes_plain_ended(struct rushes_fsp *file)
{
	struct rushes_session *session = file->session;

	if (file->plain_count == 0) {
		return;
	}
	file->plain_count -= 1;
	session->plain_count -= 1;
	if (session->plain_count == 0) {
		rushes_plain_end(session->facts);
	}
}

/*
 * 0: no daemon has bytes of it that the file lacks, nor will have before the
 * change ends: the live daemon holds the file, and no other begins to serve.
 * RUSHES_PLAIN: perhaps later. -errno: the daemon cannot write its bytes.
 */
static ssize_t rushes_hold_now(struct rushes_fsp *file)
{
	struct rushes_session *session = file->session;
	ssize_t ret;

	if (rushes_session_is_alone(session)) {
		return rushes_has_fact(session, file->device, file->inode)
			       ? RUSHES_PLAIN
			       : 0;
	}
	if (!rushes_session_has_daemon(session)) {
		return RUSHES_PLAIN;
	}
	ret = rushes_hold(session->client, file->device, file->inode);
	rushes_session_after_wait(session);
	return ret;
}

bool rushes_hold_fsp(struct vfs_handle_struct *handle,
		     struct files_struct *fsp)
{
	struct rushes_fsp *file = rushes_fsp_of_writer(handle, fsp);
	uint64_t end_ns = rushes_now_ns() + RUSHES_PATIENCE_S * RUSHES_NS_PER_S;
	int saved_errno = errno;
	ssize_t ret = RUSHES_PLAIN;

	while (file != NULL && file->session->facts != NULL) {
		/* Before the lock: a daemon that starts waits for the lock. */
		rushes_session_for_write(file->session);
		if (!rushes_wait_for_fact(file->session, file->device,
					  file->inode))
		{
			return false;
		}
		if (rushes_now_ns() > end_ns) {
			errno = EIO;
			return false;
		}
		if (!rushes_plain_begins(file)) {
			smb_msleep(RUSHES_LOOK_MS);
			continue;
		}
		ret = rushes_hold_now(file);
		if (ret == 0) {
			break;
		}
		rushes_plain_ended(file);
		if (ret != RUSHES_PLAIN) {
			errno = -ret;
			return false;
		}
	}
	errno = saved_errno;
	return true;
}

/*
 * Bytes that the kernel may have lost: only the daemon that wrote them has a
 * copy, and only as long as it lives.
 */
static bool rushes_is_loose_there(struct rushes_session *session,
				  dev_t device, ino_t inode)
{
	return session != NULL &&
	       rushes_is_loose(session->facts, device, inode) &&
	       rushes_session_has_daemon(session);
}

bool rushes_settle_inode(struct rushes_session *session, dev_t device,
			 ino_t inode)
{
	uint64_t end_ns = 0;

	if (!rushes_has_fact(session, device, inode)) {
		/* Loose bytes may have become dirty between the two looks. */
		if (!rushes_is_loose_there(session, device, inode) &&
		    !rushes_has_fact(session, device, inode))
		{
			return true;
		}
		end_ns = rushes_now_ns() + RUSHES_AGAIN_MS * (RUSHES_NS_PER_S / 1000);
	}
	/*
	 * The writer gets the error that the kernel has lost bytes, at its
	 * flush; a reader waits until the daemon has written them again.
	 */
	while (!rushes_hold_inode(session, device, inode)) {
		if (rushes_now_ns() > end_ns) {
			return false;
		}
		smb_msleep(RUSHES_LOOK_MS);
	}
	rushes_changed_inode(session, device, inode, 0, 0);
	return true;
}

bool rushes_settle_fsp(struct vfs_handle_struct *handle,
		       struct files_struct *fsp)
{
	struct rushes_fsp *file = rushes_fsp_of_writer(handle, fsp);

	return file == NULL ||
	       rushes_settle_inode(file->session, file->device, file->inode);
}

/*
 * Blocks that the daemon has reserved do not count as the file's size on the
 * disk: a client sees the blocks that the bytes need, or those that the file
 * had before, since a client may have asked for them. Sparse files take fewer;
 * smbd rounds up as configured.
 */
static void rushes_hide_reserve(struct rushes_session *session,
				SMB_STRUCT_STAT *st)
{
	uint64_t unit = MAX(st->st_ex_blksize, STAT_ST_BLOCKSIZE);
	uint64_t units = st->st_ex_size / unit + (st->st_ex_size % unit != 0);
	uint64_t blocks = units * (unit / STAT_ST_BLOCKSIZE);
	uint64_t before = 0;

	if (rushes_has_reserve(session->facts, st->st_ex_dev, st->st_ex_ino,
			       &before))
	{
		blocks = MAX(blocks, before / STAT_ST_BLOCKSIZE);
		st->st_ex_blocks = MIN(st->st_ex_blocks, blocks);
	}
}

/*
 * A dead daemon holds no file open: one of which it had bytes may have lost its
 * last name, and its inode number may belong to another file by now. The
 * session may not know yet that the daemon is dead.
 */
static bool rushes_is_another(const struct rushes_fact *fact,
			      const SMB_STRUCT_STAT *st,
			      int fd, const char *name)
{
	struct stat found = {0};
	uint64_t generation = 0;
	int path_fd = fd;

	if (fact->generation == 0) {
		return false;
	}
	if (name != NULL) {
		path_fd = openat(fd, name, O_PATH | O_CLOEXEC);
	}
	if (path_fd == -1) {
		return false;
	}
	if (fstat(path_fd, &found) == 0 && found.st_dev == st->st_ex_dev &&
	    found.st_ino == st->st_ex_ino)
	{
		generation = rushes_generation(path_fd);
	}
	if (path_fd != fd) {
		close(path_fd);
	}
	return generation != 0 && generation != fact->generation;
}

static void rushes_add_fact(struct rushes_session *session,
			    SMB_STRUCT_STAT *st, int fd, const char *name)
{
	struct rushes_fact fact;
	int saved_errno = errno;
	bool is_another;

	if (!rushes_fact_of(session->facts, st->st_ex_dev, st->st_ex_ino,
			    &fact))
	{
		return;
	}
	is_another = rushes_is_another(&fact, st, fd, name);
	errno = saved_errno;
	if (is_another) {
		return;
	}
	st->st_ex_size = fact.size;
	st->st_ex_blocks = MAX(st->st_ex_blocks,
			       (fact.size + 511) / STAT_ST_BLOCKSIZE);
	st->st_ex_mtime = (struct timespec) {
		.tv_sec = fact.changed_ns / RUSHES_NS_PER_S,
		.tv_nsec = fact.changed_ns % RUSHES_NS_PER_S,
	};
	st->st_ex_ctime = st->st_ex_mtime;
}

void rushes_fix_stat(struct vfs_handle_struct *handle, SMB_STRUCT_STAT *st,
		     int fd, const char *name)
{
	struct rushes_session *session = rushes_session_of(handle);

	if (session == NULL || !S_ISREG(st->st_ex_mode)) {
		return;
	}
	rushes_session_refresh(session);
	rushes_add_fact(session, st, fd, name);
	rushes_hide_reserve(session, st);
}

static struct rushes_fsp *rushes_copy_sources;

void rushes_copy_source(struct vfs_handle_struct *handle,
			struct files_struct *fsp)
{
	struct rushes_fsp *file = NULL;

	if (rushes_session_of(handle) == NULL) {
		return;
	}
	file = rushes_fsp_get(handle, fsp);
	if (file == NULL) {
		return;
	}
	file->is_shared_told = false;
	if (!file->is_copy_source) {
		file->is_copy_source = true;
		DLIST_ADD(rushes_copy_sources, file);
	}
}

void rushes_copy_source_closed(struct rushes_fsp *file)
{
	if (file->is_copy_source) {
		DLIST_REMOVE(rushes_copy_sources, file);
		file->is_copy_source = false;
	}
}

bool rushes_settle_copy_sources(void)
{
	struct rushes_fsp *file = NULL;

	for (file = rushes_copy_sources; file != NULL; file = file->next) {
		if (!rushes_settle_inode(file->session, file->device,
					 file->inode))
		{
			return false;
		}
	}
	return true;
}

/*
 * A copy may have been made by sharing blocks: then a write to the source needs
 * new blocks from now on, while the daemon took them for the file's own. It
 * looks again before it grants more of it.
 */
void rushes_copied(void)
{
	struct rushes_fsp *file = NULL;

	for (file = rushes_copy_sources; file != NULL; file = file->next) {
		/* A stream's bytes may lie elsewhere than in a file. */
		if (!file->is_regular || file->is_shared_told ||
		    !rushes_is_shared(fsp_get_io_fd(file->fsp)))
		{
			continue;
		}
		file->is_shared_told = true;
		/* Each reported change ends a hold: this one's own. */
		if (rushes_hold_inode(file->session, file->device,
				      file->inode))
		{
			rushes_changed_inode(file->session, file->device,
					     file->inode, 0, UINT64_MAX);
		}
	}
}
