// SPDX-License-Identifier: Apache-2.0

package dplane

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// holder keeps connections as systemd does.
type holder struct{ files map[uint64]*os.File }

func (h *holder) Put(cookie uint64, fd int) error {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		h.files[cookie] = os.NewFile(uintptr(own), "kept")
	}
	return err
}

func (h *holder) Remove(cookie uint64) {
	h.files[cookie].Close()
	delete(h.files, cookie)
}

// A client ending within a message leaves the whole message to the next one, with the connection's sessions. A real
// bfdd cannot be made to do this at a given moment, so the test writes the messages.
func TestAdopt(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "dplane"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	kept := &holder{map[uint64]*os.File{}}
	r := &recorder{sessions: map[uint32]Session{}, owners: map[uint32]Owner{}}
	start := func(c *Client) (end func()) {
		r.mu.Lock()
		r.client = c
		r.mu.Unlock()
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		return func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	fresh := func() *Client {
		return New("unix", l.Addr().String(), r, kept, slog.New(slog.NewTextHandler(testWriter{t}, nil)))
	}
	end := start(fresh())
	bfdd, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer bfdd.Close()
	bfdd.SetDeadline(time.Now().Add(2 * time.Minute))
	write := func(b []byte) {
		t.Helper()
		if _, err := bfdd.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(kind, id uint16) {
		t.Helper()
		if m, err := read(bfdd); err != nil || m.kind != kind || m.id != id || m.version != 1 {
			t.Fatalf("got %+v, %v; want %d, %d", m, err, kind, id)
		}
	}
	session := make([]byte, sessionLength)
	copy(session[4:], []byte{10, 0, 0, 1})
	copy(session[20:], []byte{10, 0, 0, 2})
	session[39], session[61] = 42, 3  // discriminator, multiplier
	session[41], session[45] = 1, 1   // intervals
	session[60], session[67] = 255, 1 // hop limit, device
	add := appendMessage(nil, 1, addSession, 0, session)
	write(add[:5]) // less than a header
	time.Sleep(20 * time.Millisecond)
	write(add[5:50])
	time.Sleep(20 * time.Millisecond)
	write(add[50:])
	expect(stateChange, 0)
	if len(kept.files) != 1 || len(r.owners) != 1 {
		t.Fatalf("kept %v, owners %v", kept.files, r.owners)
	}
	echo := appendMessage(nil, 1, echoRequest, 7, bytes.Repeat([]byte{1}, 16))
	write(echo[:11])
	end()
	if r.deleted != 0 || len(kept.files) != 1 {
		t.Fatalf("%d sessions deleted, %d connections kept", r.deleted, len(kept.files))
	}

	next := fresh()
	var files []*os.File
	for _, f := range kept.files {
		fd, err := unix.Dup(int(f.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, os.NewFile(uintptr(fd), "inherited"))
	}
	r.owners[43] = Owner{Connection: 1} // of a missing connection
	next.Adopt(files, r.owners)
	if r.deleted != 1 {
		t.Errorf("%d sessions deleted, want that without a connection", r.deleted)
	}
	end = start(next)
	write(echo[11:])
	expect(echoReply, 7)
	next.Tell(Change{Discriminator: 42})
	expect(stateChange, 0)
	write(appendMessage(nil, 1, deleteSession, 0, session))
	write(echo)
	expect(echoReply, 7)
	if r.deleted != 2 {
		t.Errorf("%d sessions deleted", r.deleted)
	}
	end()
	next.Abandon()
	if len(kept.files) != 0 {
		t.Error("the connection is kept for nobody")
	}
	if n, err := bfdd.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("%d bytes more, %v", n, err)
	}
}
