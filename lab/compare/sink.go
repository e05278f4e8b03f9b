// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sinkArg runs the lab's own binary as a fast sink; see Sink.
const sinkArg = "__count"

// counters are the counts of a fast sink, in a page of memory shared with the lab. Reading them costs the
// sink nothing.
type counters struct {
	datagrams, bytes, accepted, closed, ready atomic.Int64
}

// openCounters maps the page of a file. The mapping lasts as long as the process.
func openCounters(path string) (*counters, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := os.Getpagesize()
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	page, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	return (*counters)(unsafe.Pointer(&page[0])), nil
}

// Sink handles "weir-lab __count ADDRESS:PORT FILE": it turns the process into a fast sink. The sink has
// one UDP socket and one TCP listener, both with SO_REUSEPORT. It reads one message per system call and
// discards it, so a collector's work does not hide the cost of a path. main calls Sink first. It returns if
// the process is no such child.
func Sink() {
	if len(os.Args) != 4 || os.Args[1] != sinkArg {
		return
	}
	fmt.Fprintln(os.Stderr, "ERROR:", sinkMain(os.Args[2], os.Args[3]))
	os.Exit(1)
}

func sinkMain(addr, file string) error {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return err
	}
	c, err := openCounters(file)
	if err != nil {
		return err
	}
	udp, err := bound(unix.SOCK_DGRAM, at)
	if err != nil {
		return err
	}
	// The size equals weir's for members of a service, because the sockets must not differ.
	if err := unix.SetsockoptInt(udp, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer); err != nil {
		return err
	}
	tcp, err := bound(unix.SOCK_STREAM, at)
	if err != nil {
		return err
	}
	if err := unix.Listen(tcp, backlog); err != nil {
		return err
	}
	fail := make(chan error)
	go func() { fail <- c.readUDP(udp) }()
	go func() { fail <- c.serveTCP(tcp) }()
	c.ready.Store(1)
	return <-fail
}

func bound(kind int, at netip.AddrPort) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return -1, err
	}
	return fd, unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()})
}

// gather is the time a sink waits for more messages after the first. A collector in need of a second one is
// busy, and not woken for each message.
const gather = 200 * time.Microsecond

func rest() {
	ts := unix.NsecToTimespec(int64(gather))
	_ = unix.Nanosleep(&ts, nil)
}

func (c *counters) readUDP(fd int) error {
	runtime.LockOSThread()
	buf := make([]byte, 2048)
	wait := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(wait, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		rest()
		n := int64(0)
		for {
			// Raw: the runtime's bookkeeping of blocking system calls would be a third of the work.
			_, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
			if errno == unix.EAGAIN {
				break
			}
			if errno != 0 {
				return errno
			}
			n++
		}
		c.datagrams.Add(n)
	}
}

func (c *counters) serveTCP(listener int) error {
	runtime.LockOSThread()
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	watch := func(fd int) error {
		return unix.EpollCtl(poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
	}
	if err := watch(listener); err != nil {
		return err
	}
	events, buf := make([]unix.EpollEvent, 256), make([]byte, 16<<10)
	wait := []unix.PollFd{{Fd: int32(poll), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(wait, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		rest()
		n, err := unix.EpollWait(poll, events, 0)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		for _, e := range events[:max(n, 0)] {
			if int(e.Fd) != listener {
				c.readTCP(int(e.Fd), buf)
				continue
			}
			fd, _, err := unix.Accept(listener)
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ECONNABORTED) {
				continue
			}
			if err == nil {
				err = watch(fd)
			}
			if err != nil {
				return err
			}
			c.accepted.Add(1)
		}
	}
}

// readTCP reads once from a readable connection, and closes an ended one.
func (c *counters) readTCP(fd int, buf []byte) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
	if errno != 0 || n == 0 {
		unix.Close(fd) // also removes it from the epoll set
		c.closed.Add(1)
		return
	}
	c.bytes.Add(int64(n))
}
