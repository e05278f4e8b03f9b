// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/hook"
)

const filterElsewhere = `
filter:
  - name: elsewhere
    hook: nft
    netns: reborn
    rules: [{match: 'udp.dstport == %d', action: drop}]
`

// reborn is a running weir serve with a file whose filter is in the network namespace "reborn".
type reborn struct {
	*serving
	w      world
	path   string
	reload chan struct{}
}

// newReborn starts it, and waits until the filter is there.
func newReborn(t *testing.T) reborn {
	nstest.NeedRoot(t)
	if err := hook.NFTMatch.Check(); err != nil {
		t.Skip("need: kernel:", err)
	}
	r := reborn{w: newWorld(t), path: filepath.Join(t.TempDir(), "weir.yaml"), reload: make(chan struct{})}
	r.create()
	t.Cleanup(func() { _ = netns.Delete("reborn") }) // the test may have done so
	r.write(9)
	r.serving = r.w.serveWith(socketDir(t), ServeOptions{File: r.path, Reload: r.reload})
	nstest.Eventually(t, r.healthy)
	nstest.Eventually(t, func() error { return r.unlike(9) })
	return r
}

// create makes the namespace.
func (r reborn) create() {
	r.w.t.Helper()
	ns, err := netns.Create("reborn")
	if err != nil {
		r.w.t.Fatal(err)
	}
	ns.Close()
}

// remove deletes the namespace.
func (r reborn) remove() {
	r.w.t.Helper()
	if err := netns.Delete("reborn"); err != nil {
		r.w.t.Fatal(err)
	}
}

// write makes the file drop datagrams to a port.
func (r reborn) write(port int) {
	r.w.t.Helper()
	if err := os.WriteFile(r.path, fmt.Appendf(nil, filterElsewhere, port), 0o600); err != nil {
		r.w.t.Fatal(err)
	}
}

// unlike says how the host differs from the file with a port.
func (r reborn) unlike(port int) error {
	if steps := r.w.plan(r.w.config(filterElsewhere, port)); len(steps) > 0 {
		return fmt.Errorf("apply would %q", steps)
	}
	return nil
}

// healthy says what /healthz tells beside ok.
func (r reborn) healthy() error {
	if status, body := r.get("/healthz"); status != http.StatusOK {
		return fmt.Errorf("/healthz: %d %s", status, body)
	}
	return nil
}

// waits returns an error unless /healthz tells of a reload that waits for the namespace.
func (r reborn) waits() error {
	if err := r.healthy(); err == nil || !strings.Contains(err.Error(), "reborn") {
		return fmt.Errorf("the namespace is away, and /healthz says %v", err)
	}
	return nil
}

// A reload while a network namespace is away is tried again, as at the start, and /healthz tells the reason until then.
func TestReloadIsTriedAgain(t *testing.T) {
	r := newReborn(t)
	r.remove()
	r.write(10)
	r.reload <- struct{}{}
	nstest.Eventually(t, r.waits)
	r.create()
	nstest.Eventually(t, r.healthy)
	if err := r.unlike(10); err != nil {
		t.Error(err)
	}
}

// A file that weir apply applied meanwhile goes before the file that weir serve tries again.
func TestReloadIsNotTriedAgainAfterAnotherApply(t *testing.T) {
	r := newReborn(t)
	r.remove()
	r.write(10)
	r.reload <- struct{}{}
	nstest.Eventually(t, r.waits)
	r.w.apply(r.w.config("filter: []"))
	r.create()
	nstest.Until(t, "weir serve gives its file up", func() bool { return r.log.Has("another file was applied") })
	if err := r.healthy(); err != nil {
		t.Error(err)
	}
	if steps := r.w.plan(r.w.config("filter: []")); len(steps) > 0 {
		t.Errorf("after another apply: %q", steps)
	}
}

// A wrong file at a reload does not end the attempts to apply the one before, and /healthz tells both reasons.
func TestWrongFileKeepsTheAttempts(t *testing.T) {
	r := newReborn(t)
	r.remove()
	r.write(10)
	r.reload <- struct{}{}
	r.reload <- struct{}{} // the first one is over
	if err := os.WriteFile(r.path, []byte("filters: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.reload <- struct{}{}
	r.reload <- struct{}{}
	if err := r.healthy(); err == nil || !strings.Contains(err.Error(), "reborn") || !strings.Contains(err.Error(), `unknown key "filters"`) {
		t.Errorf("/healthz does not tell of both: %v", err)
	}
	r.create()
	nstest.Eventually(t, func() error { return r.unlike(10) })
	if err := r.healthy(); err == nil || !strings.Contains(err.Error(), `unknown key "filters"`) {
		t.Errorf("the file is wrong, and /healthz says %v", err)
	}
}
