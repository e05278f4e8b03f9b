// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const secret = "root:$6$secret:20228"

// world creates a directory of user 65534, and a file readable only by root.
func world(t *testing.T) (theirs, ours string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	dir := t.TempDir()
	theirs, ours = filepath.Join(dir, "theirs"), filepath.Join(dir, "shadow")
	if err := errors.Join(os.Mkdir(theirs, 0o755), os.Lchown(theirs, 65534, 65534), os.WriteFile(ours, []byte(secret), 0o600)); err != nil {
		t.Fatal(err)
	}
	return theirs, ours
}

func TestRead(t *testing.T) {
	dir, shadow := world(t)
	path := filepath.Join(dir, "x")
	for _, c := range []struct {
		name string
		make func() error
		want string // of the error; "": the read succeeds
	}{
		{"a file of theirs", func() error {
			return errors.Join(os.WriteFile(path, []byte("4711\n"), 0o644), os.Lchown(path, 65534, 65534))
		}, ""},
		{"a file of root's", func() error { return os.WriteFile(path, []byte("4711\n"), 0o644) }, ""},
		{"a link of root's", func() error {
			return errors.Join(os.WriteFile(path+".file", []byte("4711\n"), 0o644), os.Symlink("x.file", path))
		}, ""},
		{"an absolute link of root's, of a directory", func() error {
			return errors.Join(os.Mkdir(path+".dir", 0o755), os.WriteFile(path+".dir/y", []byte("4711\n"), 0o644), os.Symlink(path+".dir/y", path))
		}, ""},
		{"a FIFO", func() error { return unix.Mkfifo(path, 0o666) }, "FIFO"},
		{"their link", func() error { return errors.Join(os.Symlink(shadow, path), os.Lchown(path, 65534, 65534)) }, "symbolic link of user 65534"},
		{"their link of a directory", func() error {
			return errors.Join(os.Symlink(filepath.Dir(shadow), path+".up"), os.Lchown(path+".up", 65534, 65534), os.Symlink("x.up/shadow", path))
		}, "symbolic link of user 65534"},
		{"a link to itself", func() error { return os.Symlink("x", path) }, "too many levels"},
		{"a directory", func() error { return os.Mkdir(path, 0o755) }, "directory"},
		{"a device", func() error { return unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))) }, "device"}, // zero
		{"a socket", func() error {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			if err == nil {
				l.SetUnlinkOnClose(false)
				l.Close()
			}
			return err
		}, "socket"},
		{"too large", func() error { return os.WriteFile(path, make([]byte, 65), 0o644) }, "more than 64 bytes"},
		{"sparse", func() error { return errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, 1<<40)) }, "more than 64 bytes"},
		{"none", func() error { return nil }, "no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := c.make(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				for _, p := range []string{path, path + ".file", path + ".dir", path + ".up"} {
					os.RemoveAll(p)
				}
			}()
			began := time.Now()
			f, err := Read(path, 64)
			if took := time.Since(began); took > readTime/2 {
				t.Errorf("it took %v", took)
			}
			switch {
			case c.want == "" && (err != nil || string(f.Data) != "4711\n"):
				t.Errorf("%v, %v", f, err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%v, want %q", err, c.want)
			case err != nil && strings.Contains(err.Error(), "secret"):
				t.Errorf("the error quotes the file: %v", err)
			case c.name == "none" && !errors.Is(err, os.ErrNotExist):
				t.Errorf("%v is not ErrNotExist", err)
			}
		})
	}
}

func TestTrusted(t *testing.T) {
	for _, c := range []struct {
		f    File
		want bool
	}{
		{File{UID: 0, Mode: 0o644}, true}, {File{UID: uint32(os.Geteuid()), Mode: 0o600}, true},
		{File{UID: 65533, Mode: 0o644}, false}, {File{UID: 0, Mode: 0o664}, true}, {File{UID: 0, Mode: 0o646}, false},
	} {
		if c.f.Trusted() != c.want {
			t.Errorf("%+v: trusted %t", c.f, !c.want)
		}
	}
}
