// SPDX-License-Identifier: Apache-2.0

// Package register lets a collector register itself for a slot of a service steered by weir. weir
// then need not find it from outside:
//
//	if err := register.Slot(ctx, "telemetry", 0); err != nil {
//		log.Fatal(err)
//	}
//
// Call it when the sockets are bound and the program is ready to serve. The kernel withdraws the
// slot when the process exits, so there is nothing to undo. clients/c/weir.h is the same for C and
// C++.
package register

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// DefaultSocket is the registration socket of weir serve, unless $WEIR_REGISTER_SOCKET names
// another path.
const DefaultSocket = "/run/weir/register.sock"

// DefaultTimeout is the timeout of Slot for a context without a deadline.
const DefaultTimeout = 30 * time.Second

var (
	// ErrNoServe reports that no weir serve answers. weir may still find the collector itself, and
	// the collector may try again later.
	ErrNoServe = errors.New("no weir serve answers")
	// ErrRefused reports a process without the right to this slot: see the member kind user in
	// weir's configuration.
	ErrRefused = errors.New("refused")
)

// Slot registers the calling process as the member of a slot. It returns when the slot's traffic
// reaches the process. It waits for missing sockets until ctx is done, at most five minutes. Errors
// other than [ErrNoServe] and [ErrRefused] name the missing parts.
func Slot(ctx context.Context, service string, slot int) error {
	socket := os.Getenv("WEIR_REGISTER_SOCKET")
	if socket == "" {
		socket = DefaultSocket
	}
	return Client{Socket: socket}.Slot(ctx, service, slot)
}

// Client registers at the weir serve of another socket.
type Client struct{ Socket string }

// Slot is like the function Slot.
func (c Client) Slot(ctx context.Context, service string, slot int) error {
	timeout := DefaultTimeout
	if end, ok := ctx.Deadline(); ok {
		timeout = time.Until(end)
	}
	// weir's own timeout ends first, and its answer names the missing parts.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout+2*time.Second)
	defer cancel()
	form := url.Values{"service": {service}, "slot": {strconv.Itoa(slot)}, "timeout_ms": {strconv.FormatInt(timeout.Milliseconds(), 10)}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://weir/v1/register", strings.NewReader(form.Encode()))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	t := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := dial(ctx, c.Socket)
		if err != nil {
			return nil, err
		}
		if err := believable(conn.(*net.UnixConn), c.Socket); err != nil {
			conn.Close()
			return nil, err
		}
		return conn, nil
	}}
	resp, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		return fmt.Errorf("%w on %s: %w", ErrNoServe, c.Socket, err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
	text := strings.TrimSpace(string(b))
	switch resp.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusForbidden:
		return fmt.Errorf("weir serve: %w", refused(text))
	}
	return fmt.Errorf("weir serve: %s", text)
}

// dial connects. Another user can keep the listen queue full for a moment. connect(2) then fails
// with EAGAIN, and dial retries.
func dial(ctx context.Context, path string) (net.Conn, error) {
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if !errors.Is(err, syscall.EAGAIN) {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// believable checks the user of the server process. It must be root, this process's user, the user
// number in $WEIR_REGISTER_UID, or the owner of the socket's directory.
func believable(c *net.UnixConn, path string) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *syscall.Ucred
	cerr := raw.Control(func(fd uintptr) {
		cred, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err = errors.Join(cerr, err); err != nil {
		return err
	}
	if cred.Uid == 0 || int(cred.Uid) == os.Geteuid() || os.Getenv("WEIR_REGISTER_UID") == strconv.FormatUint(uint64(cred.Uid), 10) {
		return nil
	}
	var dir syscall.Stat_t
	if path[0] != '@' && syscall.Stat(filepath.Dir(path), &dir) == nil && dir.Uid == cred.Uid {
		return nil
	}
	return fmt.Errorf("user %d answers there, neither root nor this user: set $WEIR_REGISTER_UID to its number if that is right", cred.Uid)
}

// refused is ErrRefused with the server's text.
type refused string

func (r refused) Error() string   { return string(r) }
func (refused) Is(err error) bool { return err == ErrRefused }
