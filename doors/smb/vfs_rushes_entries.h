/* SPDX-License-Identifier: GPL-3.0-or-later */
/*
 * The entries of the table in vfs_rushes.c that other files have. Include after
 * Samba's "includes.h" and "smbd/smbd.h".
 */
#ifndef VFS_RUSHES_ENTRIES_H
#define VFS_RUSHES_ENTRIES_H

/* vfs_rushes_read.c */
ssize_t vfs_rushes_pread(struct vfs_handle_struct *handle,
			 struct files_struct *fsp,
			 void *data, size_t n, off_t offset);
struct tevent_req *vfs_rushes_pread_send(
	struct vfs_handle_struct *handle,
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	struct files_struct *fsp,
	void *data,
	size_t n,
	off_t offset);
ssize_t vfs_rushes_pread_recv(struct tevent_req *req,
			      struct vfs_aio_state *vfs_aio_state);
ssize_t vfs_rushes_sendfile(struct vfs_handle_struct *handle,
			    int tofd,
			    struct files_struct *fromfsp,
			    const DATA_BLOB *header,
			    off_t offset,
			    size_t n);

/* vfs_rushes_write.c */
ssize_t vfs_rushes_recvfile(struct vfs_handle_struct *handle,
			    int fromfd,
			    struct files_struct *tofsp,
			    off_t offset,
			    size_t n);
ssize_t vfs_rushes_pwrite(struct vfs_handle_struct *handle,
			  struct files_struct *fsp,
			  const void *data, size_t n, off_t offset);
struct tevent_req *vfs_rushes_pwrite_send(
	struct vfs_handle_struct *handle,
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	struct files_struct *fsp,
	const void *data,
	size_t n,
	off_t offset);
ssize_t vfs_rushes_pwrite_recv(struct tevent_req *req,
			       struct vfs_aio_state *vfs_aio_state);
int vfs_rushes_ftruncate(struct vfs_handle_struct *handle,
			 struct files_struct *fsp,
			 off_t length);
int vfs_rushes_fallocate(struct vfs_handle_struct *handle,
			 struct files_struct *fsp,
			 uint32_t mode,
			 off_t offset,
			 off_t len);
struct tevent_req *vfs_rushes_offload_read_send(
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	struct vfs_handle_struct *handle,
	struct files_struct *fsp,
	uint32_t fsctl,
	uint32_t ttl,
	off_t offset,
	size_t to_copy);
struct tevent_req *vfs_rushes_offload_write_send(
	struct vfs_handle_struct *handle,
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	uint32_t fsctl,
	DATA_BLOB *token,
	off_t transfer_offset,
	struct files_struct *dest_fsp,
	off_t dest_off,
	off_t to_copy);
NTSTATUS vfs_rushes_offload_write_recv(struct vfs_handle_struct *handle,
				       struct tevent_req *req,
				       off_t *copied);
struct tevent_req *vfs_rushes_fsync_send(
	struct vfs_handle_struct *handle,
	TALLOC_CTX *mem_ctx,
	struct tevent_context *ev,
	struct files_struct *fsp);
int vfs_rushes_fsync_recv(struct tevent_req *req,
			  struct vfs_aio_state *vfs_aio_state);

#endif /* VFS_RUSHES_ENTRIES_H */
