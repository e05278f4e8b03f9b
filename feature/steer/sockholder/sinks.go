// SPDX-License-Identifier: Apache-2.0

package sockholder

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// runSinks owns the sinks of a namespace until no service has on_empty: drop.
func runSinks(ctx context.Context, r *kernel.Root, scope string, ns *netns.Handle) error {
	// Read the pins without the lock: the starting command holds it.
	pins, err := r.OpenMapsForWriting(record.EngineInstance(scope, spec.EngineSkLookup), "sinks")
	if err != nil {
		return err
	}
	defer pins.Close()
	if err := ns.Do(func() error { return fillSinks(pins) }); err != nil {
		return err
	}
	return waitUnwanted(ctx, r, scope)
}

func fillSinks(pins *kernel.Opened) error {
	for i := range uint32(engine.Sinks) {
		domain, typ := unix.AF_INET, unix.SOCK_DGRAM
		if i >= 2 {
			domain = unix.AF_INET6
		}
		if i%2 == 1 {
			typ = unix.SOCK_STREAM
		}
		fd, err := swallower(domain, typ)
		if domain == unix.AF_INET6 && errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		} else if err != nil {
			return fmt.Errorf("open sink: %w", err)
		}
		if err := pins.Maps["sinks"].Put(i, uint64(fd)); err != nil {
			return fmt.Errorf("open sink: %w", err)
		}
	}
	return nil
}

// swallower returns a bound socket. Its filter drops every packet before the protocol sees it. It stays open until the
// process exits.
func swallower(domain, typ int) (int, error) {
	fd, err := unix.Socket(domain, typ|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	prog := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &prog[0]}); err != nil {
		return -1, err
	}
	// Any address works, because packets arrive by assignment. Loopback needs no interface.
	var sa unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	if domain == unix.AF_INET6 {
		// Use the wildcard address: ::1 does not exist while lo is down.
		sa = &unix.SockaddrInet6{}
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return -1, err
		}
	}
	if err := unix.Bind(fd, sa); err != nil {
		return -1, err
	}
	if typ == unix.SOCK_STREAM {
		return fd, unix.Listen(fd, 1)
	}
	return fd, nil
}

// waitUnwanted returns when no service of the namespace has on_empty: drop. Changes of the pins wake it. It also polls
// every 5 s.
func waitUnwanted(ctx context.Context, r *kernel.Root, scope string) error {
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return err
	}
	defer unix.Close(watch)
	const changes = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVE | unix.IN_DELETE_SELF
	unix.InotifyAddWatch(watch, filepath.Join(r.Path(), scope, spec.Name), changes)
	buf := make([]byte, 4096)
	for ctx.Err() == nil {
		unix.Poll([]unix.PollFd{{Fd: int32(watch), Events: unix.POLLIN}}, 5000)
		unix.Read(watch, buf)
		wanted := wantsDrop(r, scope)
		// Before Linux 5.16 a service has no pins between the two renames of a replacement.
		for again := 0; again < 2 && !wanted; again++ {
			if err := slots.Sleep(ctx, 250*time.Millisecond); err != nil {
				return err
			}
			wanted = wantsDrop(r, scope)
		}
		if !wanted {
			return nil
		}
	}
	return nil
}

// wantsDrop reports whether a service of the namespace has on_empty: drop. An unreadable service counts as one.
func wantsDrop(r *kernel.Root, scope string) bool {
	services, unread, err := record.ReadAll(r, scope, spec.EngineSkLookup)
	if err != nil || len(unread) > 0 {
		return true
	}
	for _, p := range services {
		if p.Service.OnEmpty == spec.Drop {
			return true
		}
	}
	return false
}
