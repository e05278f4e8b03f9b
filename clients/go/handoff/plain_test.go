// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/internal/nstest"
)

// serveHTTP answers requests with a release's name and its number of requests served.
func serveHTTP(t *testing.T, l net.Listener, release string) (ended chan error) {
	n := 0
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n++ // one connection at a time
		fmt.Fprintf(w, "%s %d %s", release, n, r.URL.Path)
	})}
	ended = make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	return ended
}

// browser sends requests over one connection.
type browser struct {
	t *testing.T
	c net.Conn
	r *bufio.Reader
}

func browse(t *testing.T, at net.Addr) *browser {
	c := dial(t, at)
	t.Cleanup(func() { c.Close() })
	return &browser{t, c, bufio.NewReader(c)}
}

func (b *browser) ask(path string) {
	b.t.Helper()
	b.c.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintf(b.c, "GET %s HTTP/1.1\r\nHost: a\r\nX: %s\r\n\r\n", path, strings.Repeat("y", 100)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *browser) want(text string) {
	b.t.Helper()
	a, err := http.ReadResponse(b.r, nil)
	if err != nil {
		b.t.Fatalf("%v, want %q", err, text)
	}
	defer a.Body.Close()
	if got, err := io.ReadAll(a.Body); err != nil || string(got) != text {
		b.t.Fatalf("%q, %v; want %q", got, err, text)
	}
}

// TestHTTP checks net/http, which never commits. The accepting process answers its connections for
// as long as they last, and no other process reads their requests.
func TestHTTP(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l := w.join("0")
	ended := serveHTTP(t, l, "old")
	old := browse(t, l.Addr())
	for i := range 1500 { // more than Options.Window
		old.ask("/x")
		old.want(fmt.Sprintf("old %d /x", i+1))
	}
	nstest.Until(t, "the keeper does not keep it", func() bool { return len(w.sessions("session")) == 0 })
	next := w.join("0")
	serveHTTP(t, next, "the new release")
	if err := <-ended; !errors.Is(err, handoff.ErrReplaced) {
		t.Errorf("%v, want ErrReplaced", err)
	}
	other := browse(t, next.Addr())
	other.ask("/y")
	other.want("the new release 1 /y")
	for i := range 10 {
		old.ask("/z")
		old.want(fmt.Sprintf("old %d /z", 1501+i))
	}
}

// TestHTTPUnserved checks that the next process serves a connection accepted but never served, also
// as a plain one.
func TestHTTPUnserved(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l := w.join("0")
	b := browse(t, l.Addr())
	b.ask("/first")
	nstest.Until(t, "it is kept", func() bool { return len(w.sessions("session")) == 1 })
	next := w.join("0")
	serveHTTP(t, next, "new")
	b.want("new 1 /first")
	b.ask("/second")
	b.want("new 2 /second")
	nstest.Until(t, "it is kept no more", func() bool { return len(w.sessions("session")) == 0 })
}

// TestHTTPAndSessions checks that a session with a state does not go to a process with plain
// connections. It stays, and nobody else reads its bytes.
func TestHTTPAndSessions(t *testing.T) {
	w := newWorld(t, keeper.Options{})
	l := w.join("0")
	plain := w.join("http")
	serveHTTP(t, plain, "http")
	b := browse(t, plain.Addr())
	b.ask("/")
	b.want("http 1 /") // Accept was called
	c := dial(t, l.Addr())
	s, err := l.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(c, "GET /mine HTTP/1.1\r\n\r\n")
	buf := make([]byte, 4)
	if _, err := io.ReadFull(s, buf); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit([]byte("state")); err != nil {
		t.Fatal(err)
	}
	if err := l.Transfer(s, "http", []byte("state")); err != nil {
		t.Fatal(err) // the keeper learns of the rejection later
	}
	s, err = l.AcceptSession()
	if err != nil || string(s.State()) != "state" {
		t.Fatalf("the session did not come back: %v", err)
	}
	if n, err := s.Read(buf); err != nil || string(buf[:n]) != "/min" {
		t.Errorf("after it came back: %q, %v", buf[:n], err)
	}
	if x := w.sessions("session"); len(x) != 1 || !strings.Contains(x[0].ReturnReason, "AcceptSession") {
		t.Errorf("%+v", x)
	}
}
