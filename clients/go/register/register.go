// SPDX-License-Identifier: Apache-2.0

// Package register lets a collector give itself a slot of a service that weir
// steers, in place of being found from outside:
//
//	if err := register.Slot(ctx, "telemetry", 0); err != nil {
//		log.Fatal(err)
//	}
//
// Call it when the sockets are bound and the program is ready to serve. The slot
// is withdrawn by the kernel when the process exits; there is nothing to undo.
// clients/c/weir.h is the same for C and C++.
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

// DefaultSocket is where weir serve takes registrations, unless
// $WEIR_REGISTER_SOCKET names another place.
const DefaultSocket = "/run/weir/register.sock"

// DefaultTimeout is how long Slot waits if its context has no deadline.
const DefaultTimeout = 30 * time.Second

var (
	// ErrNoServe says that no weir serve answers. The collector may be found by weir
	// anyway, and may try again later.
	ErrNoServe = errors.New("no weir serve answers")
	// ErrRefused says that this process may not have the slot: see the member kind
	// user in weir's configuration.
	ErrRefused = errors.New("refused")
)

// Slot registers the calling process as the member of a slot and returns once
// the slot's traffic reaches it. It waits for sockets that are still missing
// until ctx is done, at most five minutes. Other errors than [ErrNoServe] and
// [ErrRefused] say in their text what is missing.
func Slot(ctx context.Context, service string, slot int) error {
	socket := os.Getenv("WEIR_REGISTER_SOCKET")
	if socket == "" {
		socket = DefaultSocket
	}
	return Client{Socket: socket}.Slot(ctx, service, slot)
}

// Client asks the weir serve behind another socket.
type Client struct{ Socket string }

// Slot is the function of that name.
func (c Client) Slot(ctx context.Context, service string, slot int) error {
	timeout := DefaultTimeout
	if end, ok := ctx.Deadline(); ok {
		timeout = time.Until(end)
	}
	// weir's own limit comes first: its answer says what was missing.
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

// dial connects. Another user can keep the listen queue full for a moment, and connect(2) fails with EAGAIN then: that is waited out.
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

// believable checks who answers: root, this process's user, the user (a number) in
// $WEIR_REGISTER_UID, or the owner of the socket's directory.
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

// refused is ErrRefused in the server's words.
type refused string

func (r refused) Error() string   { return string(r) }
func (refused) Is(err error) bool { return err == ErrRefused }
