// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
)

func TestMain(m *testing.M) {
	lab.Enter()
	Play()
	nstest.Main(m)
}

// newEnv returns a run of the lab with the weir of this tree.
func newEnv(t *testing.T) *lab.Env {
	t.Helper()
	nstest.NeedRoot(t)
	weir := filepath.Join(t.TempDir(), "weir")
	if out, err := exec.Command("go", "build", "-o", weir, "github.com/weir-project/weir/cmd/weir").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Setenv("WEIR", weir)
	e, err := lab.NewEnv(lab.Smoke, 7)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			kept := filepath.Join(os.TempDir(), "weir-onehost-"+filepath.Base(e.Dir))
			_ = exec.Command("cp", "-r", e.Dir, kept).Run() // except for sockets
			t.Log("the files of the run are in ", kept)
		}
		e.Close()
		if left := e.Leftovers(); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return e
}

// A real router's session moves and outlives its collectors. A session to an ordinary collector starts
// anew.
func TestBMP(t *testing.T) {
	if missing := BMPMissing(); len(missing) > 0 {
		t.Skipf("need: tool %s (frr)", strings.Join(missing, ", "))
	}
	o := BMPOptions{Routes: 1000, Moves: 10, Kills: 4, PlainKills: 1}
	r, err := BMP(t.Context(), newEnv(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", *r)
	for _, n := range r.Notes {
		t.Error(n)
	}
	if r.Moves != o.Moves || r.Kills != o.Kills || r.Rescued != o.Kills || r.SessionsOpened != 1 || r.Redumps != 0 || r.Bytes != r.RouterBytes {
		t.Error("the session was disturbed")
	}
	if r.PlainRedumps != o.PlainKills || r.PlainSessions != 1+o.PlainKills {
		t.Errorf("%d kills of a plain collector, %d repeated tables of the router", o.PlainKills, r.PlainRedumps)
	}
}

// Streams outlive repeated kills of their server, without a lost or doubled byte.
func TestStream(t *testing.T) {
	r, err := Stream(t.Context(), newEnv(t), 10)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", *r)
	if r.Kills != 10 || r.Survived != r.Kills || r.Resets+r.Wrong != 0 {
		t.Error(r.Notes)
	}
}
