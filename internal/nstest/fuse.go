// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/bounded"
)

// FUSE requests (linux/fuse.h) left unanswered by a [Stubborn] file.
const (
	FuseRead  = 15
	FuseFlush = 25 // at each close
)

// ownRoles are roles of this package. Blocking processes, and processes that block others, must not
// be the test's. A blocked thread can keep Go's garbage collector from stopping the process, and
// with it the goroutine about to end the block.
var ownRoles = map[string]Role{"nstest fuse": serveFUSE, "nstest lock": holdLock}

// Stubborn is a file on a FUSE file system without answers to one kind of request.
type Stubborn struct {
	Path    string
	Asked   chan struct{} // closed at the first such request
	Release func()        // ends the file system and all waits for it; defer it, because a waiting process cannot be killed
}

// NewStubborn mounts such a file in the test's mount namespace.
func NewStubborn(t testing.TB, request uint32) *Stubborn {
	t.Helper()
	NeedRoot(t)
	s := &Stubborn{Path: filepath.Join(t.TempDir(), "file"), Asked: make(chan struct{})}
	if err := os.WriteFile(s.Path, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	server := Start(t, Child("nstest fuse", s.Path, request))
	if line, _ := server.Line(); strings.HasPrefix(line, "need: ") {
		t.Skip(line)
	} else if line != "ready" {
		t.Fatalf("no FUSE: %q", line)
	}
	s.Release = sync.OnceFunc(func() {
		server.Kill() // all waiting calls fail
		if err := unix.Unmount(s.Path, unix.MNT_DETACH); err != nil {
			t.Error("ending FUSE:", err)
		}
		bounded.Forgive() // the waiting calls return now
	})
	t.Cleanup(s.Release)
	go func() {
		if line, _ := server.Line(); line == "asked" {
			close(s.Asked)
		}
	}()
	return s
}

// serveFUSE mounts a file system on a path and serves it. It answers all but one kind of request.
func serveFUSE(args []string) error {
	request, err := strconv.ParseUint(args[1], 10, 32)
	if err != nil {
		return err
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		fmt.Println("need: kernel FUSE:", err)
		return nil
	}
	data := fmt.Sprintf("fd=%d,rootmode=100666,user_id=0,group_id=0,allow_other", fd)
	if err := unix.Mount("none", args[0], "fuse", 0, data); err != nil {
		return fmt.Errorf("mounting FUSE: %w", err)
	}
	fmt.Println("ready")
	go answerFUSE(fd, uint32(request))
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func answerFUSE(fd int, request uint32) {
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
				fmt.Println("asked")
			}
			continue
		}
		errno, body := fuseAnswer(op)
		if body == nil && errno == 0 {
			continue // FORGET, INTERRUPT: no answer
		}
		var out bytes.Buffer
		for _, v := range []any{uint32(16 + len(body)), -int32(errno), binary.NativeEndian.Uint64(b[8:]), body} {
			_ = binary.Write(&out, binary.NativeEndian, v) // to memory
		}
		_, _ = unix.Write(fd, out.Bytes()) // fails for an interrupted request
	}
}

// fuseAnswer returns the answer for a file of 64 KiB.
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

// HoldLock makes another process hold the lock of a socket, as its owner can: the process sends
// from memory that never arrives. to is nil for a connected socket. A test defers release.
func HoldLock(t testing.TB, fd int, to *unix.SockaddrInet4) (release func()) {
	t.Helper()
	s := NewStubborn(t, FuseRead)
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(own), "socket")
	defer f.Close()
	c := Child("nstest lock", s.Path)
	if to != nil {
		c = Child("nstest lock", s.Path, to.Port, netip.AddrFrom4(to.Addr))
	}
	c.ExtraFiles = []*os.File{f}
	holder := StartReady(t, c)
	<-s.Asked
	return func() { s.Release(); holder.Kill() }
}

// holdLock sends the first bytes of a file from its descriptor 3.
func holdLock(args []string) error {
	var to unix.Sockaddr
	if len(args) == 3 {
		port, perr := strconv.Atoi(args[1])
		addr, err := netip.ParseAddr(args[2])
		if err := errors.Join(perr, err); err != nil {
			return err
		}
		to = &unix.SockaddrInet4{Port: port, Addr: addr.As4()}
	}
	f, err := os.Open(args[0])
	if err != nil {
		return err
	}
	if _, err := f.Stat(); err != nil { // gives the kernel its size
		return err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return fmt.Errorf("mapping the file: %w", err)
	}
	fmt.Println("ready")
	_, _ = unix.SendmsgN(3, mem[:100], nil, to, unix.MSG_MORE) // EFAULT in the end
	return nil
}
