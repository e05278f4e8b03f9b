// SPDX-License-Identifier: Apache-2.0

package mountinfo

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParse(t *testing.T) {
	got := Parse(`36 35 98:0 / / rw,noatime shared:1 master:2 - ext4 /dev/root rw,errors=continue
37 36 0:30 /a\040b /run/my\040bpf rw - bpf none rw
38 36 0:31 / /a\134040\011\012\043é rw - tmpfs - rw
39 36 0:32 / /no` + "\u00a0" + `split rw - proc proc
40 36 broken
41 36 0:33 / /x\9\04 rw - proc
`)
	want := []Mount{
		{"98:0", "/", "/", "ext4", "/dev/root", "rw,errors=continue"},
		{"0:30", "/a b", "/run/my bpf", "bpf", "none", "rw"},
		{"0:31", "/", "/a\\040\t\n#é", "tmpfs", "-", "rw"},
		{"0:32", "/", "/no\u00a0split", "proc", "proc", ""},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := unescape(`\9\04\400\`); got != `\9\04\400\` {
		t.Errorf("no escapes become %q", got)
	}
}

// The kernel's own escapes, of every byte of a name.
func TestRead(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread() // the thread ends with the test, and its mounts with it
	if err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")); err != nil {
		t.Skip("need: a mount namespace:", err)
	}
	var name []byte
	for c := 1; c < 256; c++ {
		if c != '/' {
			name = append(name, byte(c))
		}
	}
	at := filepath.Join(t.TempDir(), string(name[:200]), string(name[200:]))
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("weir test", at, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(at, unix.MNT_DETACH) }()
	all, err := Read()
	if err != nil || !slices.ContainsFunc(all, func(m Mount) bool { return m.Point == at && m.Source == "weir test" && m.Type == "tmpfs" }) {
		t.Errorf("%q is missing from %q, %v", at, all, err)
	}
}
