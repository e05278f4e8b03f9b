// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/hook"
)

const fileOfServe = `
handoff: {keeper: {hold: %s}}
filter:
  - name: guarded
    hook: nft
    rules: [{name: others, match: 'udp.dstport == 4739', action: drop}]
`

// An error of several lines becomes one line of the log, and a list follows its colon.
func TestOneLine(t *testing.T) {
	err := fmt.Errorf("%w; nothing was changed:\n  slot 0 would be emptied\nfix the reason", errUnconfirmed)
	if got, want := oneLine(err).Error(), errUnconfirmed.Error()+"; nothing was changed: slot 0 would be emptied; fix the reason"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// weir serve rejects a file with a listen address of its own.
func TestFileListensBesideServe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "weir.yaml")
	const text = "lb:\n  name: edge\n  listen: 0.0.0.0:9743\n  tls: {certificate: c, key: k, ca: a}\n  devices: [eth0]\n  services: {talk: {number: 0, listen: [tcp 192.0.2.1:1790]}}\n  register: true\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	want := path + `:3:11: lb: listen "0.0.0.0:9743": weir serve uses that port for /metrics, with --listen 127.0.0.1:9743: `
	if _, err := (&file{path: path, listen: "127.0.0.1:9743"}).load(); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	for _, listen := range []string{"", "127.0.0.1:0", "127.0.0.1:9744"} {
		if _, err := (&file{path: path, listen: listen}).load(); err != nil {
			t.Errorf("--listen %q: %v", listen, err)
		}
	}
}

// The listens of a file count only for the features of a process: others may run in another network namespace.
func TestListensOfOnly(t *testing.T) {
	const path = "testdata/errors/same-listen.yaml"
	for _, x := range []struct {
		only   []string
		listen string
		want   string
	}{
		{nil, "", "handoff.backend: listen"},
		{[]string{"lb", "backend"}, "", "handoff.backend: listen"},
		{[]string{"lb"}, "", ""},
		{[]string{"backend"}, "", ""},
		{[]string{"backend"}, "10.2.0.2:7946", "weir serve uses that port"},
		{[]string{"filter"}, "0.0.0.0:7946", ""},
	} {
		c, err := (&file{path: path, only: x.only, listen: x.listen}).load()
		if x.want == "" && (err != nil || !slices.Equal(c.Only, x.only)) || x.want != "" && (err == nil || !strings.Contains(err.Error(), x.want)) {
			t.Errorf("--only %v --listen %q: %v", x.only, x.listen, err)
		}
	}
}

// /healthz of weir serve answers 503 until the first attempt to apply its file has ended. Here it waits for the lock.
func TestHealthBeforeTheFirstAttempt(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "weir.yaml")
	if err := os.WriteFile(path, []byte("filter: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := w.Root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlock := sync.OnceFunc(l.Unlock)
	defer unlock()
	s := w.serveWith(socketDir(t), ServeOptions{File: path})
	if status, body := s.get("/healthz"); status != http.StatusServiceUnavailable || !strings.Contains(body, path+" is not applied yet") {
		t.Errorf("before the first attempt: %d %s", status, body)
	}
	unlock()
	nstest.Eventually(t, func() error {
		if status, body := s.get("/healthz"); status != http.StatusOK {
			return fmt.Errorf("/healthz: %d %s", status, body)
		}
		return nil
	})
}

// weir serve applies its file at the start and at each reload. A file with an error changes nothing. With Only, other
// features stay unchanged.
func TestServeAppliesItsFile(t *testing.T) {
	nstest.NeedRoot(t)
	if err := hook.NFTMatch.Check(); err != nil {
		t.Skip("need: kernel:", err)
	}
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "weir.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("filters: []\n")
	if err := w.Serve(t.Context(), ServeOptions{File: path, Log: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), path+":1:1: ") {
		t.Errorf("a wrong file at the start: %v", err)
	}
	write(strings.ReplaceAll(fileOfServe, "%s", "20s"))
	log, reload := &nstest.Log{}, make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- w.Serve(ctx, ServeOptions{File: path, Reload: reload, Only: []string{"filter"}, Log: slog.New(slog.NewTextHandler(log, nil))})
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	filters := func() (names []string) {
		st, err := w.Reader("/nonexistent").Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ours, _ := Part[filter.State](st, filter.Name)
		for _, f := range ours.Filters {
			names = append(names, f.Name)
		}
		return names
	}
	nstest.Until(t, "the filter is applied", func() bool { return slices.Equal(filters(), []string{"guarded"}) })
	if all, err := w.Root.Instances("handoff"); err != nil || len(all) > 0 {
		t.Errorf("of handoff, which does not run here, %v is there, %v", all, err)
	}
	write("filters: []\n")
	reload <- struct{}{}
	reload <- struct{}{} // the first reload is over
	if got := filters(); !slices.Equal(got, []string{"guarded"}) || !strings.Contains(log.String(), "weir.yaml:1:1: unknown key") {
		t.Errorf("after a wrong file there is %v; log:\n%s", got, log)
	}
	write("filter: []\n")
	reload <- struct{}{}
	nstest.Until(t, "the filter is removed", func() bool { return len(filters()) == 0 })
}
