// SPDX-License-Identifier: Apache-2.0

package confined

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// ErrPlanted is wrapped by errors about symbolic links, and about second names of files of other users.
var ErrPlanted = errors.New("remove it")

// Open opens path, a file or directory below base, with O_PATH. It follows no link below base: a link is an error. It
// opens name by name, without openat2(2): RestrictSUIDSGID= of a unit forbids that call.
func Open(base, path string) (*os.File, error) {
	rel, err := filepath.Rel(base, path)
	if err != nil || !filepath.IsLocal(rel) {
		return nil, &os.PathError{Op: "open", Path: path, Err: fmt.Errorf("not below %s", base)}
	}
	dir, err := unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: base, Err: err}
	}
	for name := range strings.SplitSeq(rel, "/") {
		fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		unix.Close(dir)
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
		var st unix.Stat_t
		if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
			err = fmt.Errorf("%s is a symbolic link: %w", name, ErrPlanted)
		}
		if err != nil {
			unix.Close(fd)
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
		dir = fd
	}
	return os.NewFile(uintptr(dir), path), nil
}

// Name returns a name of an open file for calls that take only names. Nobody can exchange the file behind it.
func Name(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// bpf(2) follows links to pins. The owner of the pins could exchange one for a link to the pin of another program, for
// example of a firewall, and a command of root would detach that. So these functions open and make pins.

// openPin opens a pin like Open. It rejects a second name of a pin that does not belong to the owner of the directory:
// it is another program's.
func openPin(base, path string) (*os.File, error) {
	f, err := Open(base, path)
	if err != nil {
		return nil, err
	}
	dir, err := Open(base, filepath.Dir(path))
	if err != nil {
		f.Close()
		return nil, err
	}
	defer dir.Close()
	var pin, above unix.Stat_t
	err = errors.Join(unix.Fstat(int(f.Fd()), &pin), unix.Fstat(int(dir.Fd()), &above))
	if err == nil && pin.Mode&unix.S_IFMT != unix.S_IFDIR && pin.Nlink > 1 && pin.Uid != above.Uid {
		err = secondName(pin.Uid)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func secondName(uid uint32) error {
	return fmt.Errorf("it has a second name, and belongs to user %d: %w", uid, ErrPlanted)
}

// LoadMap opens the map pinned at path, below base. The library would move a pin that it knows, so it learns none.
func LoadMap(base, path string, opts *ebpf.LoadPinOptions) (*ebpf.Map, error) {
	f, err := openPin(base, path)
	if err != nil {
		return nil, err
	}
	return loadMap(f, opts)
}

// loadMap opens the map pinned as f, and closes f.
func loadMap(f *os.File, opts *ebpf.LoadPinOptions) (*ebpf.Map, error) {
	defer f.Close()
	m, err := ebpf.LoadPinnedMap(Name(f), opts)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return m.Clone()
}

// LoadLink opens the link pinned at path, below base. Like a map of LoadMap, it can be pinned once more.
func LoadLink(base, path string) (link.Link, error) {
	f, err := openPin(base, path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	ln, err := link.LoadPinnedLink(Name(f), nil)
	if err != nil {
		return nil, err
	}
	fd, ok := ln.(interface{ FD() int })
	if !ok {
		return ln, nil // of no kind that weir pins
	}
	defer ln.Close()
	dup, err := unix.FcntlInt(uintptr(fd.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return link.NewFromFD(dup)
}

// Pin pins an object at path, below base.
func Pin(base, path string, object interface{ Pin(string) error }) error {
	dir, err := Open(base, filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return object.Pin(filepath.Join(Name(dir), filepath.Base(path)))
}

// MapsOutside returns the maps with a pin outside a directory, below the mount points of BPF file systems. They belong to
// other programs, or to other roots of weir. The directory itself may have several mounts.
func MapsOutside(dir string, mounts []string) map[ebpf.MapID]bool {
	out := map[ebpf.MapID]bool{}
	own, err := os.Stat(dir)
	if err != nil {
		return out
	}
	for _, at := range mounts {
		_ = filepath.WalkDir(at, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // removed meanwhile, or closed to this user
			}
			if d.IsDir() {
				if st, err := d.Info(); err == nil && os.SameFile(st, own) {
					return fs.SkipDir
				}
				return nil
			}
			f, err := Open(at, path)
			if err != nil {
				return nil //nolint:nilerr // a link
			}
			m, err := loadMap(f, &ebpf.LoadPinOptions{ReadOnly: true})
			if err != nil {
				return nil //nolint:nilerr // a program or no pin
			}
			defer m.Close()
			if info, err := m.Info(); err == nil {
				if id, ok := info.ID(); ok {
					out[id] = true
				}
			}
			return nil
		})
	}
	return out
}

// Names lists the entries of a directory with a prefix, without the prefix.
func Names(dir, prefix string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if n, ok := strings.CutPrefix(e.Name(), prefix); ok {
			out = append(out, n)
		}
	}
	return out, nil
}
