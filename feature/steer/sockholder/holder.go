// SPDX-License-Identifier: Apache-2.0

package sockholder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"golang.org/x/sys/unix"
)

// Run owns the sockets of an engine until the engine is gone, does not need them any more, or ctx is done.
func Run(ctx context.Context, r *kernel.Root, scope string, kind spec.Engine) error {
	ns, err := r.OpenScope("", scope)
	if err != nil {
		return err
	}
	defer ns.Close()
	debug.SetGCPercent(20)
	if kind == spec.EngineReuseport {
		return runGroups(ctx, r, scope, ns)
	}
	return runSinks(ctx, r, scope, ns)
}

// runGroups keeps a socket in every group of map_groups.
func runGroups(ctx context.Context, r *kernel.Root, scope string, ns *netns.Handle) error {
	// Read the pins without the lock: the starting command holds it.
	pins, err := r.OpenMapsForWriting(record.EngineInstance(scope, spec.EngineReuseport))
	if err != nil {
		return err
	}
	defer pins.Close()
	changed := make(chan struct{}, 1)
	defer onPoke(changed)()
	start, err := pidfd.StartTime(unix.Getpid())
	if err != nil {
		return err
	}
	me := engine.SocketHolderProcess{PID: uint32(unix.Getpid()), Start: start}
	if err := pins.Maps["holder"].Put(uint32(0), me); err != nil {
		return err
	}
	held := map[engine.GroupKey]groupSocket{}
	for ctx.Err() == nil {
		wanted, err := engine.Entries[engine.GroupKey, engine.GroupValue](pins.Maps["groups"])
		if err != nil {
			return err
		}
		err = ns.Do(func() error { return followGroups(pins, held, wanted) })
		if err != nil {
			return err
		}
		if !stillThere(r, scope) {
			return nil
		}
		debug.FreeOSMemory()
		select {
		case <-ctx.Done():
		case <-changed:
		case <-time.After(5 * time.Second):
		}
	}
	return nil
}

// stillThere reports whether the published engine is the holder's. An unreadable engine may be: a pin is missing, or
// another version made it. Without these sockets its services would lose on_empty: drop.
func stillThere(r *kernel.Root, scope string) bool {
	i := record.EngineInstance(scope, spec.EngineReuseport)
	now, err := r.Open(i, "holder")
	if err != nil {
		return !errors.Is(err, kernel.ErrNotExist) || r.Has(i)
	}
	defer now.Close()
	var h engine.SocketHolderProcess
	return now.Maps["holder"].Lookup(uint32(0), &h) != nil || h.PID == uint32(unix.Getpid())
}

// onPoke makes changed receive when a command sends SIGHUP.
func onPoke(changed chan<- struct{}) (stop func()) {
	poke := make(chan os.Signal, 1)
	signal.Notify(poke, unix.SIGHUP)
	go func() {
		for range poke {
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}()
	return func() {
		signal.Stop(poke)
		close(poke)
	}
}

// groupSocket is the holder's socket in a group, and its index in map_holders.
type groupSocket struct {
	fd    int
	index uint32
}

// move moves the socket to another index, for a group now used by another service. An array accepts a socket only once.
func (h *groupSocket) move(pins *kernel.Opened, to uint32) error {
	if err := pins.Maps["holders"].Delete(h.index); err != nil && !engine.Gone(err) {
		return err
	}
	if err := pins.Maps["holders"].Put(to, uint64(h.fd)); err != nil {
		return err
	}
	h.index = to
	return nil
}

// followGroups opens and closes sockets to match wanted. A failed bind is retried later: members of another user may
// have the port.
func followGroups(pins *kernel.Opened, held map[engine.GroupKey]groupSocket, wanted map[engine.GroupKey]engine.GroupValue) error {
	for k, h := range held {
		v, ok := wanted[k]
		if ok && v.Leaving == 0 && v.SocketHolder == h.index {
			continue
		}
		if ok && v.Leaving == 0 {
			if err := h.move(pins, v.SocketHolder); err == nil {
				held[k] = h
				continue
			} // otherwise open a new socket
		}
		unix.Close(h.fd)
		delete(held, k)
	}
	for k, v := range wanted {
		if _, ok := held[k]; ok || k.Proto == 0 || v.Leaving != 0 {
			continue
		}
		fd, err := openGroupSocket(pins, k, v)
		if errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EADDRNOTAVAIL) {
			continue
		} else if err != nil {
			return fmt.Errorf("open the socket of group %s: %w", k, err)
		}
		held[k] = groupSocket{fd, v.SocketHolder}
	}
	return nil
}

// openGroupSocket opens a socket in a group. If the group has no socket, it forms the group again with its program.
func openGroupSocket(pins *kernel.Opened, k engine.GroupKey, v engine.GroupValue) (int, error) {
	typ := unix.SOCK_DGRAM
	if k.Proto == unix.IPPROTO_TCP {
		typ = unix.SOCK_STREAM
	}
	fd, err := newUserSocket(int(v.UID), int(k.Family), typ)
	if err != nil {
		return -1, err
	}
	if err := bindGroupSocket(fd, k, typ); err != nil {
		unix.Close(fd)
		return -1, err
	}
	prog, err := ebpf.NewProgramFromID(ebpf.ProgramID(v.Program))
	if err != nil { // unloaded with the last socket of the group
		if prog, err = engine.LoadGroupProgram(pins, v); err != nil {
			unix.Close(fd)
			return -1, err
		}
	}
	defer prog.Close()
	if err := (hook.ReuseportGroup{FD: fd, Name: k.String()}).Attach(prog); err != nil {
		unix.Close(fd)
		return -1, err
	}
	if err := pins.Maps["holders"].Put(v.SocketHolder, uint64(fd)); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// newUserSocket creates a socket owned by a user, because a group has a single owner. The owner is the fsuid at the
// time of socket(2) (sock_alloc in net/socket.c).
func newUserSocket(uid, family, typ int) (int, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if uid != unix.Geteuid() {
		if err := unix.Setfsuid(uid); err != nil {
			return -1, err
		}
		defer unix.Setfsuid(unix.Geteuid())
	}
	return unix.Socket(family, typ|unix.SOCK_CLOEXEC, 0)
}

// bindGroupSocket binds a socket like the members' sockets, with a filter that drops everything it receives.
func bindGroupSocket(fd int, k engine.GroupKey, typ int) error {
	swallow := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &swallow[0]}); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return err
	}
	var sa unix.Sockaddr
	if k.Family == unix.AF_INET {
		sa = &unix.SockaddrInet4{Port: int(k.Port), Addr: k.Address().As4()}
	} else {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, int(k.V6Only)); err != nil {
			return err
		}
		sa = &unix.SockaddrInet6{Port: int(k.Port), Addr: k.Addr}
	}
	if err := unix.Bind(fd, sa); err != nil {
		return err
	}
	if typ == unix.SOCK_STREAM {
		return unix.Listen(fd, 1)
	}
	return nil
}
