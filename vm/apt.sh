# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The Debian mirror of this machine, for bootstrap and the scripts of vm/. The
# project configures no mirror. It asks apt for the machine's own and changes
# only the suite.

# apt_repos prints "URI CODENAME" of every Debian repository of this machine.
apt_repos() {
	# shellcheck disable=SC2016 # the $(…) are apt's
	apt-get indextargets --format '$(REPO_URI) $(CODENAME)' \
		'Created-By: Packages' 'Origin: Debian' 2>/dev/null | sort -u
}

# debian_mirror archive|security prints the URI of the archive, or of the security
# archive. apt knows them only after reading the lists. Container images have no
# lists.
debian_mirror() {
	local repos codename uri
	repos=$(apt_repos)
	if [ -z "$repos" ]; then
		apt-get -q update >&2 || return 1
		repos=$(apt_repos)
	fi
	codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
	uri=$(awk -v want="$codename" '$2 == want { print $1; exit }' <<<"$repos")
	if [ "$1" = security ]; then
		local security
		security=$(awk '$2 ~ /-security$/ { print $1; exit }' <<<"$repos")
		# Mirrors have both side by side under these names.
		uri=${security:-${uri/%debian\//debian-security/}}
	fi
	if [ -z "$uri" ]; then
		echo "no Debian mirror found in this machine's apt sources" >&2
		return 1
	fi
	echo "$uri"
}
