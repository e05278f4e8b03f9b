// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/bounded"
)

// Requests of FUSE (linux/fuse.h) that a [Stubborn] file can leave unanswered.
const (
	FuseRead  = 15
	FuseFlush = 25 // at each close
)

// Stubborn is a file on a FUSE file system that never answers one kind of request.
type Stubborn struct {
	Path    string
	Asked   chan struct{} // closed with the first such request
	Release func()        // ends the file system, and all waits for it. A test defers it: whoever waits cannot be killed
}

// NewStubborn mounts such a file in the test's mount namespace.
func NewStubborn(t testing.TB, request uint32) *Stubborn {
	t.Helper()
	NeedRoot(t)
	s := &Stubborn{Path: filepath.Join(t.TempDir(), "file"), Asked: make(chan struct{})}
	if err := os.WriteFile(s.Path, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("need: kernel FUSE:", err)
	}
	s.Release = sync.OnceFunc(func() {
		if err := unix.Unmount(s.Path, unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
			t.Error("ending FUSE:", err)
		}
		bounded.Forgive() // the calls that wait come back now
	})
	data := fmt.Sprintf("fd=%d,rootmode=100666,user_id=0,group_id=0,allow_other", fd)
	if err := unix.Mount("none", s.Path, "fuse", 0, data); err != nil {
		unix.Close(fd)
		t.Fatal("mounting FUSE:", err)
	}
	t.Cleanup(s.Release)
	go s.serve(fd, request)
	return s
}

func (s *Stubborn) serve(fd int, request uint32) {
	defer unix.Close(fd)
	b := make([]byte, 1<<17)
	asked := false
	for {
		n, err := unix.Read(fd, b)
		if err == unix.EINTR || err == unix.ENOENT { // a request was interrupted
			continue
		}
		if err != nil || n < 40 {
			return
		}
		op := binary.NativeEndian.Uint32(b[4:])
		if op == request {
			if !asked {
				asked = true
				close(s.Asked)
			}
			continue
		}
		errno, body := fuseAnswer(op)
		if body == nil && errno == 0 {
			continue // FORGET, INTERRUPT: nobody waits
		}
		var out bytes.Buffer
		for _, v := range []any{uint32(16 + len(body)), -int32(errno), binary.NativeEndian.Uint64(b[8:]), body} {
			_ = binary.Write(&out, binary.NativeEndian, v) // to memory
		}
		_, _ = unix.Write(fd, out.Bytes()) // one that was interrupted
	}
}

// fuseAnswer answers for a file of 64 KiB.
func fuseAnswer(op uint32) (errno unix.Errno, body []byte) {
	var out bytes.Buffer
	put := func(all ...any) {
		for _, v := range all {
			_ = binary.Write(&out, binary.NativeEndian, v) // to memory
		}
	}
	switch op {
	case 26: // INIT: version 7.31, then limits
		put(uint32(7), uint32(31), uint32(0), uint32(0), uint16(16), uint16(12), uint32(65536), uint32(1), [9]uint32{1})
	case 3: // GETATTR: valid for an hour; inode, size, blocks, times, mode, links, owner, rdev, block size
		put(uint64(3600), uint64(0), uint64(1), uint64(65536), uint64(128), [3]uint64{}, [3]uint32{}, uint32(0o100666), uint32(1), [3]uint32{}, uint32(4096), uint32(0))
	case 14: // OPEN
		put(uint64(7), uint64(0))
	case 2, 36, 42: // FORGET, INTERRUPT, BATCH_FORGET
		return 0, nil
	default:
		return unix.ENOSYS, []byte{}
	}
	return 0, out.Bytes()
}

// HoldLock has a thread of this process hold the lock of a socket, as its owner can: it sends from memory that does not come.
// to is nil for a connected socket. A test defers release.
func HoldLock(t testing.TB, fd int, to unix.Sockaddr) (release func()) {
	t.Helper()
	s := NewStubborn(t, FuseRead)
	f, err := os.Open(s.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Stat(); err != nil { // the kernel learns its size
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal("mapping the file:", err)
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = unix.SendmsgN(own, mem[:100], nil, to, unix.MSG_MORE) // EFAULT at last
		unix.Close(own)
	}()
	<-s.Asked
	return func() { s.Release(); <-ended; _ = unix.Munmap(mem) }
}
