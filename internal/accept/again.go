// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	osuser "os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/weir-project/weir/internal/sockdiag"
	"golang.org/x/sys/unix"
)

// ErrAnswers reports another process answering at the address of a listener.
var ErrAnswers = errors.New("another process answers there")

// A killed process holds its sockets until the kernel has closed all its descriptors. A successor
// may start earlier.
const (
	takeOverEvery = 20 * time.Millisecond
	// TakeOver is how long a successor waits for the address of its predecessor.
	TakeOver = 3 * time.Second
)

// Again calls listen until the address is free, for at most TakeOver. When ctx is done it returns
// the context's error. It logs the wait. Only EADDRINUSE and [ErrAnswers] are retried. listen runs
// in the calling goroutine, because its thread may be in another network namespace.
func Again(ctx context.Context, log *slog.Logger, address string, listen func() (net.Listener, error)) (net.Listener, error) {
	began, told := time.Now(), false
	for {
		l, err := listen()
		waited := time.Since(began)
		switch {
		case err == nil && told:
			log.Info("address is free", "address", address, "waited", waited.Round(time.Millisecond))
			return l, nil
		case err == nil:
			return l, nil
		case waited > TakeOver || !errors.Is(err, syscall.EADDRINUSE) && !errors.Is(err, ErrAnswers):
			return nil, err
		case !told:
			told = true
			log.Warn("address is in use, waiting for the predecessor to end", "address", address, "timeout", TakeOver)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for the predecessor at %s: %w", address, ctx.Err())
		case <-time.After(takeOverEvery):
		}
	}
}

// TCP listens at an address in the network namespace of the calling thread, like [Again]. 0.0.0.0
// means only IPv4. [::] and an empty host mean both families.
func TCP(ctx context.Context, log *slog.Logger, address string) (net.Listener, error) {
	return tcp(ctx, log, address, net.ListenConfig{})
}

// TCPAhead is like [TCP], but also accepts an address not yet on any interface. Connections arrive
// once an interface has it.
func TCPAhead(ctx context.Context, log *slog.Logger, address string) (net.Listener, error) {
	return tcp(ctx, log, address, net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1) }); cerr != nil {
			return cerr
		}
		return err // also for IPv6
	}})
}

func tcp(ctx context.Context, log *slog.Logger, address string, lc net.ListenConfig) (net.Listener, error) {
	// Go uses MPTCP for listeners by default. Agents and scrapers do not need it.
	lc.SetMultipathTCP(false)
	l, err := Again(ctx, log, address, func() (net.Listener, error) { return lc.Listen(ctx, network(address), address) })
	if errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("%w%s", err, holders(address))
	}
	return l, err
}

// holders returns the end of a message with the users of the sockets at an address. It is empty if
// the kernel lists none.
func holders(address string) string {
	a, err := net.ResolveTCPAddr(network(address), address)
	if err != nil {
		return ""
	}
	at := a.AddrPort()
	if a.IP == nil {
		at = netip.AddrPortFrom(netip.IPv6Unspecified(), at.Port())
	}
	all, err := sockdiag.Holding(at)
	if err != nil || len(all) == 0 {
		return ""
	}
	var uids []uint32
	for _, s := range all {
		uids = append(uids, s.UID)
	}
	slices.Sort(uids)
	var names []string
	for _, uid := range slices.Compact(uids) {
		names = append(names, userName(uid))
	}
	return ": a socket of user " + strings.Join(names, ", ") + " has it"
}

// userName returns a user's name and number.
func userName(uid uint32) string {
	id := strconv.FormatUint(uint64(uid), 10)
	if u, err := osuser.LookupId(id); err == nil {
		return u.Username + " (" + id + ")"
	}
	return id
}

// network returns the network to listen at. For 0.0.0.0 package net would otherwise create a socket
// of both families.
func network(address string) string {
	host, _, err := net.SplitHostPort(address)
	if a, aerr := netip.ParseAddr(host); err == nil && aerr == nil && a.Is4() {
		return "tcp4"
	}
	return "tcp"
}
