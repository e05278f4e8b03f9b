// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"path/filepath"
	"strings"
	"syscall"

	"github.com/weir-project/weir/internal/pidfd"
	"golang.org/x/sys/unix"
)

// gracefulSignals are those by which a server answers what it has begun before it ends,
// where that is not SIGTERM. By SIGTERM these cut requests off in the middle.
//
// Sources: nginx's "Controlling nginx", HAProxy's management guide section 4, httpd's
// "Stopping and Restarting", php-fpm(8), lighttpd(8).
var gracefulSignals = map[string]syscall.Signal{
	"nginx":    unix.SIGQUIT,
	"angie":    unix.SIGQUIT,
	"haproxy":  unix.SIGUSR1,
	"httpd":    unix.SIGWINCH,
	"apache2":  unix.SIGWINCH,
	"php-fpm":  unix.SIGQUIT,
	"lighttpd": unix.SIGINT,
}

// gracefulSignal is the signal that ends a process in good order, by the file that it
// executes: an operator's own copy, or one of a container, has the same name. It is SIGTERM
// for programs that are not known, and where the name cannot be read.
func gracefulSignal(pid int) syscall.Signal {
	exe, err := pidfd.Readlink(pid, "exe")
	if err != nil {
		return unix.SIGTERM
	}
	name := filepath.Base(strings.TrimSuffix(exe, " (deleted)"))               // an upgrade replaced the file
	for _, n := range []string{name, strings.TrimRight(name, "0123456789.")} { // php-fpm8.2
		if sig, ok := gracefulSignals[n]; ok {
			return sig
		}
	}
	return unix.SIGTERM
}
