// SPDX-License-Identifier: Apache-2.0

package users

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// searchPath is the PATH of programs running as another user.
const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// OfProcess returns the identity of a running process: user, group, supplementary groups and
// capabilities. The user is the real one, or the effective one if the real one is root. So a
// set-user-ID program gives its caller no privileges, and a daemon with a lowered effective user
// regains none.
func OfProcess(pid int) (id Identity, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return id, err
	}
	if err := id.parse(string(text)); err != nil {
		return id, fmt.Errorf("/proc/%d/status: %w", pid, err)
	}
	name, home := strconv.FormatUint(uint64(id.Credential.Uid), 10), "/"
	if u, err := user.LookupId(name); err == nil {
		name, home = u.Username, u.HomeDir
	}
	id.Env = []string{"USER=" + name, "LOGNAME=" + name, "HOME=" + home}
	return id, nil
}

// parse parses proc_pid_status(5). The kernel escapes the name on the first line, so it cannot
// imitate another line.
func (id *Identity) parse(status string) error {
	found := 0
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		base := 10
		switch key {
		case "Uid", "Gid", "Groups":
		case "CapPrm":
			base = 16
		default:
			continue
		}
		var numbers []uint64
		for f := range strings.FieldsSeq(value) {
			n, err := strconv.ParseUint(f, base, 64)
			if err != nil || base == 10 && n > 1<<32-1 {
				return fmt.Errorf("%s: %q is not a 32-bit number", key, f)
			}
			numbers = append(numbers, n)
		}
		switch {
		case (key == "Uid" || key == "Gid") && len(numbers) != 4 || key == "CapPrm" && len(numbers) != 1:
			return fmt.Errorf("%s: %d numbers", key, len(numbers))
		case key == "Uid":
			id.Credential.Uid = lesser(numbers)
		case key == "Gid":
			id.Credential.Gid = lesser(numbers)
		case key == "Groups":
			for _, n := range numbers {
				id.Credential.Groups = append(id.Credential.Groups, uint32(n))
			}
		case key == "CapPrm":
			id.limit = &numbers[0]
		}
		found++
	}
	if found != 4 {
		return errors.New("no lines Uid, Gid, Groups and CapPrm")
	}
	return nil
}

// lesser returns the real id, or the effective one if the real one is root's.
func lesser(ids []uint64) uint32 {
	if ids[0] != 0 {
		return uint32(ids[0])
	}
	return uint32(ids[1])
}

// Environ returns the environment of a program running as this identity. From this process's
// environment, which may contain secrets, it keeps only language and time zone.
func (id *Identity) Environ() []string {
	env := append([]string{searchPath}, id.Env...)
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		if name == "LANG" || name == "TZ" || name == "TERM" || strings.HasPrefix(name, "LC_") {
			env = append(env, v)
		}
	}
	return env
}

// SysProcAttr runs a process as this identity in a new session. On the terminal of this command,
// that user could otherwise inject input (TIOCSTI). The process leads its process group.
func (id *Identity) SysProcAttr() *syscall.SysProcAttr {
	if os.Geteuid() != 0 && int(id.Credential.Uid) == os.Geteuid() {
		return &syscall.SysProcAttr{Setsid: true} // only root may call setgroups
	}
	return &syscall.SysProcAttr{Setsid: true, Credential: &id.Credential}
}

// Confine prevents programs started by this thread from gaining privileges by set-user-ID programs
// or file capabilities, and from inheriting descriptors that are open now. As root, it also removes the capabilities missing in the process of the
// identity. It is irreversible, so discard the thread afterwards.
func (id *Identity) Confine() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	// A setuid(2) by another user than root keeps ambient and inheritable capabilities, for example those of a unit's
	// AmbientCapabilities=.
	if err := errors.Join(inheritNothing(), closeOnExec()); err != nil {
		return err
	}
	if id.limit == nil || id.Credential.Uid != 0 {
		return nil // users other than root have no capabilities after exec
	}
	for c := uintptr(0); c < 64; c++ {
		if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); err != nil {
			break // past the kernel's last one
		} else if has == 0 || *id.limit>>c&1 == 1 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return nil
}

// inheritNothing empties the ambient and inheritable sets of this thread.
func inheritNothing() error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	if data[0].Inheritable == 0 && data[1].Inheritable == 0 { // then no capability is ambient either
		return nil
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0 // and with it the ambient ones (capabilities(7))
	if err := unix.Capset(&head, &data[0]); err != nil {
		return fmt.Errorf("drop inheritable capabilities: %w", err)
	}
	return nil
}

// Program finds a program as this identity would. It rejects a program if a third user, neither
// root nor the identity, can change or replace it.
func (id *Identity) Program(name string) (string, error) {
	names := []string{name}
	if !strings.Contains(name, "/") {
		names = nil
		for dir := range strings.SplitSeq(strings.TrimPrefix(searchPath, "PATH="), ":") {
			names = append(names, dir+"/"+name)
		}
	} else if !strings.HasPrefix(name, "/") {
		return "", fmt.Errorf("%s: relative path: use an absolute one", name)
	}
	err := fmt.Errorf("%s: %w in %s", name, os.ErrNotExist, searchPath)
	for _, path := range names {
		e := id.owned(path, 40)
		if e == nil {
			return path, nil
		}
		if len(names) == 1 || !errors.Is(e, os.ErrNotExist) {
			return "", e
		}
	}
	return "", err
}

// owned checks each directory and link on the way to path, and the file itself.
func (id *Identity) owned(path string, links int) error {
	at := ""
	parts := slices.DeleteFunc(strings.Split(path, "/"), func(p string) bool { return p == "" || p == "." })
	for i, part := range append([]string{"/"}, parts...) {
		if at != "/" {
			at += "/"
		}
		if i == 0 {
			at = ""
		}
		at += part
		var st unix.Stat_t
		if err := unix.Lstat(at, &st); err != nil {
			return &os.PathError{Op: "stat", Path: at, Err: err}
		}
		kind, last := st.Mode&unix.S_IFMT, i == len(parts)
		if st.Uid != 0 && st.Uid != id.Credential.Uid {
			return fmt.Errorf("%s belongs to user %d, who could replace the program: chown it to root", at, st.Uid)
		}
		if kind == unix.S_IFLNK {
			target, err := os.Readlink(at)
			if err != nil {
				return err
			}
			if links--; links < 0 {
				return &os.PathError{Op: "open", Path: path, Err: unix.ELOOP}
			}
			if !strings.HasPrefix(target, "/") {
				target = at[:strings.LastIndexByte(at, '/')+1] + target
			}
			return id.owned(strings.Join(append([]string{target}, parts[i:]...), "/"), links)
		}
		if shared := st.Mode&0o002 != 0 || st.Mode&0o020 != 0 && st.Gid != 0; shared && (kind != unix.S_IFDIR || st.Mode&unix.S_ISVTX == 0) {
			return fmt.Errorf("%s is writable by users other than its owner: chmod go-w %s", at, at)
		}
		if last && (kind != unix.S_IFREG || st.Mode&0o111 == 0) {
			return fmt.Errorf("%s is not a program: not a regular file, or not executable", at)
		}
	}
	return nil
}
